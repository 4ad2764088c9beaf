"""From samples back to arrays: every row once, missing rows -1."""

from functools import partial

import msgspec
import numpy as np
import pytest

from radix_rl.errors import ReplayError
from radix_rl.rollout.sample import Sample
from radix_rl.train.replay.assemble import assemble_replay, delete_refs
from radix_rl.types import SamplingParams
from radix_transfer_plugins import OutputStore

BUFFER_BYTES = 1 << 20


@pytest.fixture
def sample_of(answer, ask):
    def make(num_prompt: int, num_outputs: int, index: int = 0, **changes) -> Sample:
        request = ask(num_prompt, sampling=SamplingParams(max_new_tokens=num_outputs), **changes)
        backend = "memory" if request.return_outputs_via_store else None
        return Sample.from_response(request, answer(request), group_id=0, index=index, store_backend=backend)

    return make


@pytest.mark.parametrize("via_store", [True, False])
def test_a_sample_gets_one_row_a_token_but_the_last(store, sample_of, rows, via_store):
    samples = [
        sample_of(5, 3, return_outputs_via_store=via_store),
        sample_of(2, 1, return_outputs_via_store=via_store),
    ]
    first, second = assemble_replay(samples, store, ["routed_experts"], BUFFER_BYTES)
    assert first["routed_experts"].dtype == np.int32
    assert np.array_equal(first["routed_experts"], rows(0, 7))
    assert np.array_equal(second["routed_experts"], rows(0, 2))


def test_turns_are_joined_in_row_order(answer, store, sample_of, ask, rows):
    sample = sample_of(5, 3)
    later = ask(
        0,
        input_ids=(*sample.tokens, 50),
        sampling=SamplingParams(max_new_tokens=2),
        routed_experts_start_len=sample.replay.covered_rows,
    )
    sample.add_response(later, answer(later), store_backend="memory")
    (arrays,) = assemble_replay([sample], store, ["routed_experts"], BUFFER_BYTES)
    assert np.array_equal(arrays["routed_experts"], rows(0, 10))


def test_injected_tokens_at_the_end_have_rows_of_minus_one(store, sample_of, rows):
    sample = sample_of(5, 3)
    sample.add_injected([60, 61, 62])
    (arrays,) = assemble_replay([sample], store, ["routed_experts"], BUFFER_BYTES)
    assert arrays["routed_experts"].shape == (10, 2, 3)
    assert np.array_equal(arrays["routed_experts"][:7], rows(0, 7))
    assert (arrays["routed_experts"][7:] == -1).all()


def test_a_cut_sample_reads_only_its_own_rows(store, sample_of, rows):
    sample = sample_of(5, 3)
    sample.truncate(6)
    (arrays,) = assemble_replay([sample], store, ["routed_experts"], BUFFER_BYTES)
    assert np.array_equal(arrays["routed_experts"], rows(0, 5))


def test_a_prompt_without_output_trains_on_its_rows_but_the_last(store, sample_of, rows):
    (arrays,) = assemble_replay([sample_of(5, 0)], store, ["routed_experts"], BUFFER_BYTES)
    assert np.array_equal(arrays["routed_experts"], rows(0, 4))


def test_a_one_token_prompt_without_output_has_zero_rows_with_their_shape(store, sample_of):
    (arrays,) = assemble_replay([sample_of(1, 0)], store, ["routed_experts"], BUFFER_BYTES)
    assert arrays["routed_experts"].shape == (0, 2, 3)


def test_a_field_over_the_read_buffer_names_the_setting(store, sample_of):
    with pytest.raises(ReplayError, match=r"buffer_bytes 10; raise output_store\.read_buffer_bytes"):
        assemble_replay([sample_of(5, 3)], store, ["routed_experts"], 10)


def test_shared_segments_are_read_once_and_deleted_once(store, sample_of, rows, monkeypatch):
    parent = sample_of(5, 3)
    child = msgspec.structs.replace(parent, index=1)
    seen: list[tuple[str, str]] = []
    read_many = OutputStore.read_many

    def counting(self, requests, **options):
        seen.extend((ref.key, field) for ref, fields, *_ in requests for field in fields)
        return read_many(self, requests, **options)

    monkeypatch.setattr(OutputStore, "read_many", counting)
    first, second = assemble_replay([parent, child], store, ["routed_experts"], BUFFER_BYTES)
    assert len(seen) == 1
    assert np.array_equal(first["routed_experts"], second["routed_experts"])
    first["routed_experts"][0] = 0
    assert np.array_equal(second["routed_experts"], rows(0, 7))
    assert delete_refs([parent, child], store) == 1
    assert list(store.list_objects()) == []


def test_deleting_reaches_refs_of_rows_that_were_cut(answer, store, sample_of, ask):
    sample = sample_of(5, 3)
    later = ask(
        0,
        input_ids=tuple(sample.tokens),
        sampling=SamplingParams(max_new_tokens=2),
        routed_experts_start_len=sample.replay.covered_rows,
    )
    sample.add_response(later, answer(later), store_backend="memory")
    sample.truncate(6)
    assert delete_refs([sample], store) == 2
    assert delete_refs([sample], store) == 2
    assert list(store.list_objects()) == []


def test_a_lost_object_is_named_with_sample_field_and_key(store, sample_of):
    kept, lost = sample_of(5, 3, index=0), sample_of(5, 3, index=1)
    delete_refs([lost], store)
    (ref,) = lost.replay.refs()
    with pytest.raises(ReplayError, match=rf"sample 0/1: field 'routed_experts' is lost.*{ref.key}"):
        assemble_replay([kept, lost], store, ["routed_experts"], BUFFER_BYTES)


def test_a_field_that_no_sample_has_is_left_out(store, sample_of):
    sample = sample_of(5, 3, return_routed_experts=False, return_outputs_via_store=False)
    assert assemble_replay([sample], None, ["routed_experts"], BUFFER_BYTES) == [{}]


def test_stored_rows_without_a_store_are_refused(sample_of):
    with pytest.raises(ReplayError, match="was given none"):
        assemble_replay([sample_of(5, 3)], None, ["routed_experts"], BUFFER_BYTES)


def test_the_sampling_mask_skips_injected_tokens(engine, store, answer, counted, ask):
    options = {"return_routed_experts": False, "return_sampling_mask": True}
    first = ask(3, sampling=SamplingParams(max_new_tokens=2), **options)
    engine.script = partial(counted, sampling_mask=[[7, 8], [9]])
    sample = Sample.from_response(first, answer(first), group_id=0, index=0, store_backend="memory")
    second = ask(0, input_ids=(*sample.tokens, 50), sampling=SamplingParams(max_new_tokens=2), **options)
    engine.script = partial(counted, sampling_mask=[[4], [5, 6]])
    sample.add_response(second, answer(second), store_backend="memory")
    fields = ["sampling_mask_lengths", "sampling_mask_token_ids"]
    (arrays,) = assemble_replay([sample], store, fields, BUFFER_BYTES)
    assert arrays["sampling_mask_lengths"].tolist() == [2, 1, 0, 1, 2]
    assert arrays["sampling_mask_token_ids"].tolist() == [7, 8, 9, 4, 5, 6]
    sample.truncate(7)
    (arrays,) = assemble_replay([sample], store, fields, BUFFER_BYTES)
    assert arrays["sampling_mask_lengths"].tolist() == [2, 1, 0, 1]
    assert arrays["sampling_mask_token_ids"].tolist() == [7, 8, 9, 4]
