"""Joining, checking and cutting replay rows without reading them."""

from functools import partial

import msgspec
import numpy as np
import pytest

from radix_rl.errors import ReplayError
from radix_rl.rollout.replay_index import ReplayIndex, StoreSegment
from radix_rl.types import FinishReason, SamplingParams
from radix_transfer_plugins import TokenOutputStash

MEMORY = "memory"
ABORT = FinishReason(type="abort")


def spans(index: ReplayIndex, field: str = "routed_experts") -> list[tuple[int, int]]:
    return [(segment.start_row, segment.end_row) for segment in index.segments[field]]


def sampled(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count)


def test_rows_of_one_answer_are_prompt_plus_output_minus_one(answer, ask):
    request = ask(5, sampling=sampled(3))
    index = ReplayIndex()
    index.add_response(request, answer(request), store_backend=MEMORY)
    assert spans(index) == [(0, 7)]
    assert index.covered_rows == 7
    assert len(index.refs()) == 1


def test_a_request_without_output_has_one_row_a_prompt_token(answer, ask):
    request = ask(5, sampling=sampled(0))
    index = ReplayIndex()
    index.add_response(request, answer(request), store_backend=MEMORY)
    assert spans(index) == [(0, 5)]


def test_a_later_turn_starts_at_the_covered_rows_and_brings_the_boundary_row(answer, ask):
    # Turn 1: 5 + 3 tokens, rows [0, 7). Turn 2: those 8, 2 injected ones and 4 sampled: rows [7, 13).
    first, second = ask(5, sampling=sampled(3)), ask(10, sampling=sampled(4), routed_experts_start_len=7)
    index = ReplayIndex()
    index.add_response(first, answer(first), store_backend=MEMORY)
    index.add_response(second, answer(second), store_backend=MEMORY)
    assert spans(index) == [(0, 7), (7, 13)]
    assert len(index.refs()) == 2


def test_a_boundary_row_that_comes_twice_is_taken_from_the_later_turn(answer, ask):
    first, second = ask(5, sampling=sampled(3)), ask(10, sampling=sampled(4), routed_experts_start_len=6)
    index = ReplayIndex()
    index.add_response(first, answer(first), store_backend=MEMORY)
    index.add_response(second, answer(second), store_backend=MEMORY)
    assert spans(index) == [(0, 6), (6, 13)]


@pytest.mark.parametrize(("start", "complaint"), [(8, r"gap: rows \[7, 8\)"), (3, r"overlap: rows \[3, 7\)")])
def test_a_gap_or_an_overlap_is_refused_and_changes_nothing(answer, ask, start, complaint):
    first, second = ask(5, sampling=sampled(3)), ask(10, sampling=sampled(4), routed_experts_start_len=start)
    index = ReplayIndex()
    index.add_response(first, answer(first), store_backend=MEMORY)
    with pytest.raises(ReplayError, match=complaint):
        index.add_response(second, answer(second), store_backend=MEMORY)
    assert spans(index) == [(0, 7)]
    # The refused answer's object must still be deleted.
    assert len(index.refs()) == 2


def test_an_engine_that_ignored_the_start_and_says_so_is_used_from_the_start_on(answer, ask, rows):
    first = ask(5, sampling=sampled(3), return_outputs_via_store=False)
    second = ask(10, sampling=sampled(4), routed_experts_start_len=7, return_outputs_via_store=False)
    whole = msgspec.structs.replace(second, routed_experts_start_len=0)
    index = ReplayIndex()
    index.add_response(first, answer(first), store_backend=None)
    index.add_response(second, answer(whole), store_backend=None)
    assert spans(index) == [(0, 7), (7, 13)]
    assert np.array_equal(index.segments["routed_experts"][1].array, rows(7, 13))


def test_an_engine_that_ignored_the_start_in_silence_is_seen_by_its_span(answer, ask):
    first = ask(5, sampling=sampled(3), return_outputs_via_store=False)
    second = ask(10, sampling=sampled(4), routed_experts_start_len=7, return_outputs_via_store=False)
    whole = answer(msgspec.structs.replace(second, routed_experts_start_len=0))
    index = ReplayIndex()
    index.add_response(first, answer(first), store_backend=None)
    with pytest.raises(ReplayError, match="ignored routed_experts_start_len"):
        index.add_response(second, msgspec.structs.replace(whole, routed_experts_start=7), store_backend=None)


def test_any_number_of_aborts_and_resumes_covers_every_row_once(engine, answer, counted, ask):
    index = ReplayIndex()
    num_tokens = 4
    for outputs in (2, 0, 1, 3):
        request = ask(num_tokens, sampling=sampled(9), routed_experts_start_len=index.covered_rows)
        engine.script = partial(counted, num_tokens=outputs, finish_reason=ABORT)
        index.add_response(request, answer(request), store_backend=MEMORY)
        num_tokens += outputs
    assert num_tokens == 10
    assert spans(index) == [(0, 5), (5, 6), (6, 9)]


def test_an_answer_aborted_before_its_first_token_needs_no_rows(engine, answer, counted, ask):
    engine.script = partial(counted, num_tokens=0, finish_reason=ABORT)
    request = ask(5)
    index = ReplayIndex()
    index.add_response(request, answer(request), store_backend=MEMORY)
    assert index.segments == {}
    assert index.refs() == []


def test_a_store_request_answered_inline_names_router_and_plugin(answer, ask):
    request = ask(5, sampling=sampled(3))
    inline = answer(msgspec.structs.replace(request, return_outputs_via_store=False))
    with pytest.raises(ReplayError, match=r"router.*--output-store-backend.*radix-engine-plugins"):
        ReplayIndex().add_response(request, inline, store_backend=MEMORY)


def test_an_answer_without_what_was_asked_names_the_server_flag(answer, ask):
    request = ask(5, sampling=sampled(3), return_outputs_via_store=False)
    bare = answer(msgspec.structs.replace(request, return_routed_experts=False))
    with pytest.raises(ReplayError, match="--enable-return-routed-experts"):
        ReplayIndex().add_response(request, bare, store_backend=None)


def test_a_ref_of_another_backend_is_refused(answer, ask):
    request = ask(5, sampling=sampled(3))
    index = ReplayIndex()
    with pytest.raises(ReplayError, match="'memory', expected 'mooncake'"):
        index.add_response(request, answer(request), store_backend="mooncake")
    assert index.refs() == []


def test_store_and_inline_of_one_field_do_not_mix(answer, ask):
    first = ask(5, sampling=sampled(3))
    second = ask(8, sampling=sampled(2), routed_experts_start_len=7, return_outputs_via_store=False)
    index = ReplayIndex()
    index.add_response(first, answer(first), store_backend=MEMORY)
    with pytest.raises(ReplayError, match="one source per field"):
        index.add_response(second, answer(second), store_backend=MEMORY)


def test_a_turn_of_another_shape_is_refused(answer, ask):
    first = ask(5, sampling=sampled(3), return_outputs_via_store=False)
    second = ask(8, sampling=sampled(2), routed_experts_start_len=7, return_outputs_via_store=False)
    index = ReplayIndex()
    index.add_response(first, answer(first), store_backend=None)
    other = TokenOutputStash(routed_experts=np.zeros((2, 2, 4), np.int32))
    with pytest.raises(ReplayError, match=r"\(\(2, 4\), 'int32'\), expected \(\(2, 3\), 'int32'\)"):
        index.add_response(second, msgspec.structs.replace(answer(second), outputs=other), store_backend=None)


def test_an_unknown_field_is_named(answer, store, ask):
    class Other(msgspec.Struct):
        surprise: np.ndarray

    request = ask(5, sampling=sampled(3))
    (ref,) = store.put_many([Other(surprise=np.zeros(3, np.int32))])
    output = msgspec.structs.replace(answer(request), output_store_ref=ref)
    with pytest.raises(ReplayError, match="unknown replay output 'surprise'"):
        ReplayIndex().add_response(request, output, store_backend=MEMORY)


def test_cutting_drops_unused_segments_but_keeps_their_refs(answer, ask):
    first, second = ask(5, sampling=sampled(3)), ask(10, sampling=sampled(4), routed_experts_start_len=7)
    index = ReplayIndex()
    index.add_response(first, answer(first), store_backend=MEMORY)
    index.add_response(second, answer(second), store_backend=MEMORY)
    index.truncate(num_tokens=7, prompt_tokens=5)
    assert spans(index) == [(0, 6)]
    assert len(index.refs()) == 2


def test_the_sampling_mask_is_indexed_by_the_tokens_it_belongs_to(engine, answer, counted, ask):
    options = {"return_routed_experts": False, "return_sampling_mask": True}
    first, second = ask(5, sampling=sampled(2), **options), ask(9, sampling=sampled(1), **options)
    index = ReplayIndex()
    engine.script = partial(counted, sampling_mask=[[7, 8], [9]])
    index.add_response(first, answer(first), store_backend=MEMORY)
    engine.script = partial(counted, sampling_mask=[[4, 5, 6]])
    index.add_response(second, answer(second), store_backend=MEMORY)
    # Tokens 5 and 6 were sampled in turn 1, 7 and 8 injected, token 9 sampled in turn 2.
    assert spans(index, "sampling_mask_lengths") == [(5, 7), (9, 10)]
    assert spans(index, "sampling_mask_token_ids") == [(5, 7), (9, 10)]
    index.truncate(num_tokens=6, prompt_tokens=5)
    assert spans(index, "sampling_mask_lengths") == [(5, 6)]


def test_a_segment_refers_to_the_object_of_its_answer(answer, ask):
    request = ask(5, sampling=sampled(3))
    index = ReplayIndex()
    output = answer(request)
    index.add_response(request, output, store_backend=MEMORY)
    (segment,) = index.segments["routed_experts"]
    assert isinstance(segment, StoreSegment)
    assert segment.ref is output.output_store_ref
