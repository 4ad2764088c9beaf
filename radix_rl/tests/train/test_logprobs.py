"""Log-probabilities of the distribution sampled from."""

import math

import pytest
import torch

from radix_rl.config.rollout import SamplingConfig
from radix_rl.train import logprobs
from radix_rl.train.batch import collate
from radix_rl.train.logprobs import response_logprobs, token_logprobs

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
