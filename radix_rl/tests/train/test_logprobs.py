"""Log-probabilities of the distribution sampled from."""

import math

import numpy as np
import pytest
import torch

from radix_rl.config.rollout import SamplingConfig
from radix_rl.errors import ReplayError
from radix_rl.train.batch import SamplingMask, TrainSample, collate
from radix_rl.train.objective import logprobs
from radix_rl.train.objective.logprobs import KeptIds, response_logprobs, token_logprobs

LOGITS = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))


@pytest.mark.parametrize(
    ("settings", "token", "probability"),
    [
        ({}, 1, 0.3),
        # Squares over their sum: 0.09 / (0.25 + 0.09 + 0.0225 + 0.0025).
        ({"temperature": 0.5}, 1, 0.09 / 0.365),
        ({"top_k": 2}, 1, 0.3 / 0.8),
        # The token that crosses 0.6 is kept.
        ({"top_p": 0.6}, 1, 0.3 / 0.8),
        # 0.15 is at least 0.3 of the largest, 0.05 is not.
        ({"min_p": 0.3}, 2, 0.15 / 0.95),
        ({"top_k": 3, "top_p": 0.7}, 0, 0.5 / 0.8),
        # A token the engine sampled is possible, whatever rounding says here.
        ({"top_k": 1}, 3, 0.05 / 0.55),
    ],
)
def test_transforms_are_the_engines(settings, token, probability):
    found = token_logprobs(LOGITS, torch.tensor([token]), SamplingConfig(**settings))
    assert float(found) == pytest.approx(math.log(probability), abs=1e-6)


@pytest.mark.parametrize(
    ("kept", "token", "probability"),
    [([1, 2], 1, 0.3 / 0.45), ([3], 3, 1.0), ([0, 1, 2, 3], 2, 0.15)],
)
def test_with_a_recorded_mask_its_ids_are_the_vocabulary(kept, token, probability):
    mask = KeptIds(torch.zeros(len(kept), dtype=torch.int64), torch.tensor(kept))
    # What top-k alone would leave here is another set.
    found = token_logprobs(LOGITS, torch.tensor([token]), SamplingConfig(top_k=1), mask)
    assert float(found) == pytest.approx(math.log(probability), abs=1e-6)


def masked_samples(make_samples):
    """Each response token was sampled from itself and two other ids."""
    samples = []
    for sample in make_samples():
        response = sample.tokens[-sample.num_response_tokens :]
        ids = np.stack([response, (response + 1) % 64, (response + 9) % 64], axis=1)
        mask = SamplingMask(
            lengths=np.full(len(response), 3, np.int32), token_ids=ids.reshape(-1).astype(np.int32)
        )
        fields = {name: getattr(sample, name) for name in sample.__struct_fields__}
        samples.append(TrainSample(**{**fields, "sampling_mask": mask}))
    return samples


@pytest.mark.parametrize("chunk_rows", [3, 4096])
def test_each_token_has_the_mask_it_was_sampled_from(make_model, make_samples, monkeypatch, chunk_rows):
    monkeypatch.setattr(logprobs, "CHUNK_ROWS", chunk_rows)
    model = make_model("llama")
    samples = masked_samples(make_samples)
    samples[1].loss_mask[0] = 0
    batch = collate(samples, torch.device("cpu"))
    found = response_logprobs(model, batch, SamplingConfig(top_k=1))
    for row, sample in enumerate(samples):
        ids = torch.from_numpy(sample.tokens)
        logits = model(input_ids=ids[None]).logits[0]
        for place in range(sample.num_response_tokens):
            token = len(ids) - sample.num_response_tokens + place
            kept = torch.from_numpy(sample.sampling_mask.token_ids[3 * place : 3 * place + 3]).long()
            expected = logits[token - 1, kept].log_softmax(-1)[0] * float(sample.loss_mask[place])
            torch.testing.assert_close(found[row, token], expected, rtol=0, atol=1e-5)
    live = response_logprobs(model, batch, SamplingConfig(top_k=1), replay_mask=False)
    assert (live - found).abs().max() > 1e-2


def test_a_mask_of_another_models_vocabulary_is_refused(make_model, make_samples):
    samples = masked_samples(make_samples)
    samples[0].sampling_mask.token_ids[0] = 64
    with pytest.raises(ReplayError, match="names id 64, the model's vocabulary has 64"):
        response_logprobs(make_model("llama"), collate(samples, torch.device("cpu")), SamplingConfig(top_k=1))


def test_positions_speak_of_the_token_itself(make_model, make_samples):
    model = make_model("llama")
    samples = make_samples()
    batch = collate(samples, torch.device("cpu"))
    found = response_logprobs(model, batch, SamplingConfig())
    for row, sample in enumerate(samples):
        ids = torch.from_numpy(sample.tokens)
        expected = model(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        first = sample.num_tokens - sample.num_response_tokens
        torch.testing.assert_close(found[row, first : len(ids)], expected[first - 1 :], rtol=0, atol=1e-5)
        assert not found[row, :first].any()
        assert not found[row, len(ids) :].any()


def test_chunks_change_neither_values_nor_gradients(make_model, make_samples, monkeypatch):
    batch = collate(make_samples(), torch.device("cpu"))
    results = []
    for rows in (3, 4096):
        monkeypatch.setattr(logprobs, "CHUNK_ROWS", rows)
        model = make_model("llama")
        values = response_logprobs(model, batch, SamplingConfig(temperature=0.8))
        values.sum().backward()
        results.append((values.detach(), model.lm_head.weight.grad))
    torch.testing.assert_close(results[0], results[1])


def test_a_batch_without_counted_tokens_gives_zeros_and_zero_gradients(make_model, make_samples):
    model = make_model()
    batch = collate(make_samples(2), torch.device("cpu"))
    batch.loss_mask_bt.zero_()
    values = response_logprobs(model, batch, SamplingConfig())
    values.sum().backward()
    assert not values.any()
    assert not model.lm_head.weight.grad.any()
