"""Samples: turns, injected tokens, cutting, crossing process borders."""

import msgspec
import numpy as np
import pytest

from radix_rl.errors import ReplayError
from radix_rl.rollout.sample import Sample, check_uniform, decode_samples, encode_samples
from radix_rl.types import LOGPROB_FLOOR, SamplingParams, VersionSpan


@pytest.fixture
def two_turns(answer, ask) -> Sample:
    """5 prompt tokens, 3 sampled, 2 injected, 4 sampled: 14 tokens, rows [0, 13)."""
    first = ask(5, sampling=SamplingParams(max_new_tokens=3))
    sample = Sample.from_response(first, answer(first), group_id=7, index=2, store_backend="memory")
    second = ask(
        0,
        input_ids=(*sample.tokens, 50, 51),
        sampling=SamplingParams(max_new_tokens=4),
        routed_experts_start_len=sample.replay.covered_rows,
    )
    sample.add_response(second, answer(second), store_backend="memory")
    return sample


def test_turns_join_with_injected_tokens_out_of_the_loss(two_turns):
    assert two_turns.tokens == [1, 2, 3, 4, 5, 1000, 1001, 1002, 50, 51, 1000, 1001, 1002, 1003]
    assert two_turns.loss_mask == [1, 1, 1, 0, 0, 1, 1, 1, 1]
    assert two_turns.rollout_logprobs == [-0.5, -1.5, -2.5, 0.0, 0.0, -0.5, -1.5, -2.5, -3.5]
    assert two_turns.version_spans == [VersionSpan(0, 3, "0"), VersionSpan(5, 9, "0")]
    assert two_turns.replay.covered_rows == len(two_turns.tokens) - 1


def test_a_token_without_a_finite_log_probability_is_counted_and_not_learnt_from(answer, ask):
    request = ask(5, sampling=SamplingParams(max_new_tokens=3))
    output = msgspec.structs.replace(answer(request), output_logprobs=(-0.5, LOGPROB_FLOOR, -2.5))
    sample = Sample.from_response(request, output, group_id=0, index=0, store_backend="memory")
    assert sample.loss_mask == [1, 0, 1]
    assert sample.rollout_logprobs == [-0.5, 0.0, -2.5]
    assert sample.floored_tokens == 1


def test_one_cut_goes_through_everything(two_turns):
    two_turns.truncate(11)
    assert two_turns.tokens == [1, 2, 3, 4, 5, 1000, 1001, 1002, 50, 51, 1000]
    assert two_turns.loss_mask == [1, 1, 1, 0, 0, 1]
    assert two_turns.rollout_logprobs == [-0.5, -1.5, -2.5, 0.0, 0.0, -0.5]
    assert two_turns.version_spans == [VersionSpan(0, 3, "0"), VersionSpan(5, 6, "0")]
    assert two_turns.replay.covered_rows == 10
    assert two_turns.finish_reason.type == "length"


def test_a_limit_that_is_not_reached_cuts_nothing(two_turns):
    before = encode_samples([two_turns])
    two_turns.truncate(14)
    assert encode_samples([two_turns]) == before


def test_cutting_into_the_prompt_is_refused(two_turns):
    with pytest.raises(ReplayError, match=r"sample 7/2.*prompt alone has 5"):
        two_turns.truncate(4)


def test_a_request_that_does_not_continue_the_tokens_is_refused(two_turns, answer, ask):
    other = ask(20, routed_experts_start_len=13, sampling=SamplingParams(max_new_tokens=1))
    with pytest.raises(ReplayError, match="does not continue its 14 tokens"):
        two_turns.add_response(other, answer(other), store_backend="memory")
    assert len(two_turns.tokens) == 14


@pytest.mark.parametrize("via_store", [True, False])
def test_a_sample_survives_strict_msgpack(answer, ask, rows, via_store):
    request = ask(5, sampling=SamplingParams(max_new_tokens=3), return_outputs_via_store=via_store)
    backend = "memory" if via_store else None
    sample = Sample.from_response(request, answer(request), group_id=0, index=1, store_backend=backend)
    sample.reward = 0.5
    sample.metadata["problem_id"] = "p"
    (back,) = decode_samples(encode_samples([sample]))
    for field in ("group_id", "index", "tokens", "loss_mask", "rollout_logprobs", "version_spans", "reward"):
        assert getattr(back, field) == getattr(sample, field)
    assert back.replay.refs() == sample.replay.refs()
    (segment,) = back.replay.segments["routed_experts"]
    if via_store:
        assert segment == sample.replay.segments["routed_experts"][0]
    else:
        assert segment.array.dtype == np.int32
        assert np.array_equal(segment.array, rows(0, 7))


def test_what_is_not_a_sample_is_refused_with_its_path():
    with pytest.raises(msgspec.ValidationError, match=r"unknown field|missing required field"):
        decode_samples(msgspec.msgpack.encode([{"surprise": 1}]))


def test_a_field_must_be_on_all_samples_or_on_none(two_turns, answer, ask):
    request = ask(5, sampling=SamplingParams(max_new_tokens=3), return_routed_experts=False)
    request = msgspec.structs.replace(request, return_outputs_via_store=False)
    bare = Sample.from_response(request, answer(request), group_id=8, index=0, store_backend=None)
    check_uniform([bare, bare], ["routed_experts"])
    check_uniform([two_turns, two_turns], ["routed_experts"])
    with pytest.raises(ReplayError, match="sample 8/0 has no 'routed_experts'"):
        check_uniform([two_turns, bare], ["routed_experts"])
