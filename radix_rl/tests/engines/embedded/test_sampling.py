"""Distributions, supports and penalties, computed by hand or from the model's own logits."""

import asyncio
from functools import partial

import numpy as np
import pytest
import torch

from radix_rl.engines.embedded.sampling import batch as sampling_batch
from radix_rl.engines.embedded.sampling import sampler
from radix_rl.engines.embedded.sampling.batch import SamplingBatch
from radix_rl.engines.embedded.sampling.sampler import Sampler
from radix_rl.engines.embedded.sampling.uniform import uniform
from radix_rl.engines.embedded.schedule.sequence import Sequence

PROBS = [0.4, 0.3, 0.2, 0.1]


@pytest.fixture
def sample(request_of):
    """`sample(probs, **sampling)`: one draw for each seed, from the same distribution."""

    def run(probs, seeds=range(1), output_ids=(), **fields):
        sequences = [
            Sequence(
                request=request_of(str(seed), (0,), **fields),
                seed=seed,
                stop_token_ids=frozenset({0}),
                on_finish=lambda _: None,
                output_ids=list(output_ids),
            )
            for seed in seeds
        ]
        batch = SamplingBatch(sequences, len(probs), torch.device("cpu"))
        logits = torch.tensor(probs).log().repeat(len(sequences), 1)
        return Sampler().sample(logits, batch)

    return run


def test_frequencies_are_those_of_the_distribution(sample):
    tokens = np.array(sample(PROBS, seeds=range(20000)).tokens)
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 20000, PROBS, atol=0.012)


def test_temperature_sharpens_the_distribution(sample):
    drawn = sample(PROBS, seeds=range(20000), temperature=0.5)
    squared = np.array(PROBS) ** 2
    expected = squared / squared.sum()
    np.testing.assert_allclose(np.bincount(drawn.tokens, minlength=4) / 20000, expected, atol=0.012)
    np.testing.assert_allclose(drawn.logprobs, np.log(expected)[drawn.tokens], atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 1}, [0]),
        ({"top_p": 0.5}, [0, 1]),
        ({"top_p": 0.75}, [0, 1, 2]),
        ({"min_p": 0.6}, [0, 1]),
        ({"top_k": 3, "top_p": 0.95, "min_p": 0.3}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.3}, [0, 1]),
        ({}, [0, 1, 2, 3]),
    ],
)
def test_support_is_what_was_sampled_from_and_logprobs_are_renormalised(sample, fields, kept):
    drawn = sample(PROBS, seeds=range(400), return_sampling_mask=True, **fields)
    mass = sum(PROBS[i] for i in kept)
    assert set(drawn.tokens) == set(kept)
    for row, (token, logprob) in enumerate(zip(drawn.tokens, drawn.logprobs, strict=True)):
        support = drawn.supports[row]
        assert support.token_ids.tolist() == kept
        np.testing.assert_allclose(np.exp(support.logprobs), [PROBS[i] / mass for i in kept], atol=1e-6)
        assert logprob == pytest.approx(np.log(PROBS[token] / mass), abs=1e-5)


def test_greedy_support_is_one_token(sample):
    drawn = sample(PROBS, temperature=0.0, return_sampling_mask=True)
    assert drawn.tokens == [0]
    assert drawn.supports[0].token_ids.tolist() == [0]
    assert drawn.supports[0].logprobs.tolist() == [0.0]
    assert drawn.logprobs[0] == pytest.approx(np.log(0.4), abs=1e-6)


@pytest.mark.parametrize("fields", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_support_holds_its_token_and_finite_logprobs_where_no_logit_is_finite(sample, fields, bad):
    # The logarithms that the fixture takes of these are not finite either.
    drawn = sample([bad, 0.5, 0.3, 0.2], return_sampling_mask=True, **fields)
    support = drawn.supports[0]
    assert drawn.logprobs == [-9999.0]
    assert support.token_ids.tolist() == drawn.tokens
    assert np.isfinite(support.logprobs).all()
    if fields != {"temperature": 0.0}:
        assert support.logprobs.tolist() == [-9999.0]


def test_penalties_act_on_sampled_tokens(sample):
    # Token 0 came twice. Log 0.4 loses 2 * 0.5 for frequency and 0.25 for presence; repetition doubles it.
    drawn = sample(
        PROBS,
        output_ids=(0, 0),
        temperature=0.0,
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
    )
    scores = np.log(PROBS)
    scores[0] = 2 * (scores[0] - 1.0 - 0.25)
    assert drawn.tokens == [1]
    assert drawn.logprobs[0] == pytest.approx(scores[1] - np.log(np.exp(scores).sum()), abs=1e-5)


def test_end_tokens_wait_for_the_minimum_length(sample):
    assert 0 not in sample(PROBS, seeds=range(200), min_new_tokens=1, max_new_tokens=4).tokens
    assert 0 in sample(PROBS, seeds=range(200), min_new_tokens=1, max_new_tokens=4, output_ids=(1,)).tokens


def test_uniforms_are_uniform_and_depend_on_seed_and_position_alone():
    seeds, positions = np.divmod(np.arange(512 * 512, dtype=np.uint64), np.uint64(512))
    drawn = uniform(seeds, positions)
    assert ((drawn > 0) & (drawn < 1)).all()
    # 2621 are expected in each hundredth, with a standard deviation of 51.
    assert np.abs(np.histogram(drawn, 100, (0, 1))[0] - 2621).max() < 260
    assert uniform(seeds[700:701], positions[700:701]) == drawn[700]
    table = drawn.reshape(512, 512)
    for axis in range(2):
        for distance in (1, 2, 32):
            first, second = np.moveaxis(table, axis, 0)[:-distance], np.moveaxis(table, axis, 0)[distance:]
            # A quarter of a million pairs: their correlation has a standard deviation of 0.002.
            assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.012


def constant(share, seeds, positions):
    return np.full(np.broadcast_shapes(seeds.shape, positions.shape), share)


def test_no_share_reaches_a_token_without_probability(monkeypatch, sample):
    probs = [0.0, 0.7, 0.0, 0.3, 0.0]
    for share, token in ((2.0**-53, 1), (0.5, 1), (0.9, 3), (1 - 2.0**-53, 3)):
        monkeypatch.setattr(sampling_batch, "uniform", partial(constant, share))
        assert sample(probs).tokens == [token]
        assert sample(probs, top_k=4).tokens == [token]


def test_every_token_of_a_large_vocabulary_has_its_chance(monkeypatch, sample):
    size = 200_000
    probs = [0.5, *[0.5 / (size - 1)] * (size - 1)]
    for token in (1, 1234, size // 2, size - 1):
        share = 0.5 + 0.5 * (token - 0.5) / (size - 1)
        monkeypatch.setattr(sampling_batch, "uniform", partial(constant, share))
        # Rounding the probabilities to float32 shifts where each begins.
        assert abs(sample(probs).tokens[0] - token) <= 2


def test_drawing_a_block_first_changes_no_draw(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(64, dtype=torch.float64, generator=generator)
    uniforms[:4] = torch.tensor([2.0**-53, 1 - 2.0**-53, 0.5, 0.25], dtype=torch.float64)
    for size in (257, 4097, 6000, 8192):
        weights = (3 * torch.randn(64, size, generator=generator)).softmax(-1)
        # Many tokens without probability, whole blocks and the last ones among them.
        weights[:, torch.rand(size, generator=generator) < 0.5] = 0.0
        weights[:, 256:512] = 0.0
        weights[::2, size - 3 :] = 0.0
        monkeypatch.setattr(sampler, "_DRAWN_AT_ONCE", size)
        at_once = sampler._draw(weights, uniforms)
        monkeypatch.setattr(sampler, "_DRAWN_AT_ONCE", 0)
        assert torch.equal(sampler._draw(weights, uniforms), at_once)
        assert (weights.gather(1, at_once[:, None]) > 0).all()
        weights[7] = float("nan")
        drawn = sampler._draw(weights, uniforms)
        assert ((drawn >= 0) & (drawn < size)).all()


def test_a_rare_token_is_drawn_as_often_as_its_probability_says(sample):
    drawn = sample([0.99, 0.005, 0.005], seeds=range(20000)).tokens
    # 100 of each rare one are expected, with a standard deviation of 10.
    assert drawn.count(1) == pytest.approx(100, abs=45)
    assert drawn.count(2) == pytest.approx(100, abs=45)


async def test_masks_have_one_support_for_each_output_token(qwen3_moe, engine_of, prompt, request_of):
    requests = [
        request_of(
            str(i),
            prompt(9, i),
            max_new_tokens=6,
            seed=i,
            return_sampling_mask=True,
            sampling_logprobs_mode=mode,
            **fields,
        )
        for i, (mode, fields) in enumerate(
            [
                ("support", {"top_p": 0.7}),
                ("selected", {"top_k": 5}),
                ("support", {"temperature": 0.0}),
                ("support", {"top_k": 9, "min_p": 0.01, "temperature": 1.3}),
            ]
        )
    ]
    async with engine_of(qwen3_moe) as engine:
        outputs = await asyncio.gather(*[engine.generate(request) for request in requests])
    for request, output in zip(requests, outputs, strict=True):
        stash = output.outputs
        assert len(stash.sampling_mask_lengths) == 6
        assert stash.sampling_mask_lengths.sum() == len(stash.sampling_mask_token_ids)
        ends = np.cumsum(stash.sampling_mask_lengths)
        ids = torch.tensor([[*request.input_ids, *output.output_ids]])
        with torch.no_grad():
            logits = qwen3_moe(input_ids=ids).logits[0, 8:-1] / (request.sampling.temperature or 1.0)
        for i, token in enumerate(output.output_ids):
            support = stash.sampling_mask_token_ids[ends[i] - stash.sampling_mask_lengths[i] : ends[i]]
            assert token in support
            best = logits[i].topk(len(support)).indices
            assert sorted(support) == sorted(best.tolist())
            if request.sampling.temperature:
                renormalised = logits[i] - logits[i][support].logsumexp(0)
                assert output.output_logprobs[i] == pytest.approx(renormalised[token].item(), abs=1e-4)
        assert (stash.sampling_mask_logprobs is None) == (request.sampling_logprobs_mode == "selected")
