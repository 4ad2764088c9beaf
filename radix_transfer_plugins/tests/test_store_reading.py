"""read_many and get_many: what is read when, who owns what, and that nothing wrong is returned."""

import gc
import tracemalloc

import numpy as np
import pytest

from radix_transfer_plugins import (
    OutputStore,
    StoreRef,
    TokenOutputStash,
)
from radix_transfer_plugins.codecs.experts import ExpertsCodec
from radix_transfer_plugins.codecs.narrow import NarrowCodec
from radix_transfer_plugins.codecs.raw import RawCodec
from radix_transfer_plugins.errors import (
    CorruptObjectError,
    FieldMissingError,
    ObjectLostError,
    ReadBufferError,
    RefError,
    ReleasedViewError,
)


def rows_of(num_rows, fill=None, seed=0):
    if fill is not None:
        return np.full((num_rows, 4, 2), fill, np.int32)
    return np.random.default_rng(seed).integers(-1, 16, (num_rows, 4, 2), dtype=np.int32)


def put(store, *arrays, **options):
    return store.put_many([TokenOutputStash(routed_experts=array) for array in arrays], **options)


def read_experts(store, requests, buffer_bytes=1 << 20):
    stashes = store.read_many(requests, stash_type=TokenOutputStash, buffer_bytes=buffer_bytes)
    return [stash.routed_experts for stash in stashes]


# read_many


def test_chunks_hold_at_most_the_buffer_in_order_and_one_lease_at_a_time(store, backend):
    refs = put(store, *[rows_of(n) for n in (1, 2, 3, 4, 1)])  # 32 bytes a row
    arrays = read_experts(store, [(ref, ["routed_experts"]) for ref in refs], buffer_bytes=128)
    keys = [f"{ref.key}/routed_experts" for ref in refs]
    assert backend.get_calls == [keys[:2], keys[2:3], keys[3:4], keys[4:]]
    assert backend.most_open_leases == 1
    assert [len(array) for array in arrays] == [1, 2, 3, 4, 1]


@pytest.mark.parametrize(
    ("codec", "buffer_bytes", "message"),
    [
        (RawCodec(), 31, "32 bytes, of which 32 are read at once, more than buffer_bytes 31"),
        (ExpertsCodec(16, 4), 40, "of which .* are read at once, more than buffer_bytes 40"),
    ],
)
def test_a_field_whose_least_part_is_over_the_buffer_fails_before_anything_is_read(
    backend, codec, buffer_bytes, message
):
    store = OutputStore(backend, codecs={"routed_experts": codec})
    refs = put(store, rows_of(1, fill=3), rows_of(5, fill=3))
    with pytest.raises(ReadBufferError, match=message):
        read_experts(store, [(ref, ["routed_experts"]) for ref in refs], buffer_bytes=buffer_bytes)
    assert backend.get_calls == []


@pytest.mark.parametrize(("codec", "row_bytes"), [(RawCodec(), 32), (NarrowCodec(16), 8)])
def test_a_field_larger_than_the_buffer_is_read_in_pieces_of_rows(backend, codec, row_bytes, monkeypatch):
    store = OutputStore(backend, codecs={"routed_experts": codec})
    small, large = rows_of(1), rows_of(10, seed=1)
    refs = put(store, small, large, start_rows=[{}, {"routed_experts": 100}])
    pieces = []
    get_range_into = backend.get_range_into

    def spy(key, stored_bytes, offset, buffer):
        pieces.append((offset // row_bytes, len(buffer) // row_bytes))
        get_range_into(key, stored_bytes, offset, buffer)

    monkeypatch.setattr(backend, "get_range_into", spy)
    requests = [
        (refs[0], ["routed_experts"]),
        (refs[1], ["routed_experts"]),
        (refs[1], ["routed_experts"], {"routed_experts": (102, 108)}),
        (refs[1], ["routed_experts"], {"routed_experts": (105, 105)}),
    ]
    arrays = read_experts(store, requests, buffer_bytes=4 * row_bytes + 1)
    assert pieces == [(0, 4), (4, 4), (8, 2)]
    for array, expected in zip(arrays, (small, large, large[2:8], large[:0]), strict=True):
        assert array.dtype == np.int32
        assert np.array_equal(array, expected)
        assert array.flags.writeable


def test_damage_in_a_field_that_is_read_in_pieces_is_found(store, backend):
    (ref,) = put(store, rows_of(10))
    key = f"{ref.key}/routed_experts"
    data = bytearray(backend.get_batch([key]).views[0])
    data[200] ^= 1
    backend.delete_batch([key])
    backend.put_batch([(key, bytes(data))])
    with pytest.raises(CorruptObjectError, match="has the checksum crc32"):
        read_experts(store, [(ref, ["routed_experts"])], buffer_bytes=64)


def test_a_field_missing_from_a_ref_fails_before_anything_is_read(store, backend):
    refs = put(store, rows_of(1))
    with pytest.raises(FieldMissingError, match="no field 'indexer_topk'; it holds: routed_experts"):
        store.read_many(
            [(refs[0], ["routed_experts"]), (refs[0], ["indexer_topk"])],
            stash_type=TokenOutputStash,
            buffer_bytes=99,
        )
    with pytest.raises(
        FieldMissingError, match="TokenOutputStash has no field 'routed_expert'; it has: routed_experts"
    ):
        read_experts(store, [(refs[0], ["routed_expert"])])
    with pytest.raises(FieldMissingError, match="sequence of field names"):
        read_experts(store, [(refs[0], "routed_experts")])
    assert backend.get_calls == []


@pytest.mark.parametrize("reads_into_memory", [False, True])
def test_a_field_is_read_once_however_often_it_is_asked_for_and_nothing_is_shared(
    store, backend, reads_into_memory
):
    backend.reads_into_memory = reads_into_memory
    (ref,) = put(store, rows_of(6), start_rows=[{"routed_experts": 10}])
    copy = StoreRef.from_builtins(ref.to_builtins())
    requests = [
        (ref, ["routed_experts", "routed_experts"]),
        (copy, ["routed_experts"], {"routed_experts": (12, 15)}),
        (ref, ["routed_experts"]),
        (copy, ["routed_experts"], {"routed_experts": (10, 16)}),
    ]
    arrays = read_experts(store, requests)
    assert backend.get_calls == [[f"{ref.key}/routed_experts"]]
    assert [array.shape[0] for array in arrays] == [6, 3, 6, 6]
    assert np.array_equal(arrays[1], rows_of(6)[2:5])
    for array in arrays:
        array[...] = -7
    arrays = read_experts(store, requests)
    assert np.array_equal(arrays[0], rows_of(6))
    arrays[0][...] = -7
    assert np.array_equal(arrays[2], rows_of(6))


@pytest.mark.parametrize("rows", [(9, 12), (12, 17), (14, 12), (-1, 2)])
def test_rows_that_are_not_there_are_refused_before_anything_is_read(store, backend, rows):
    (ref,) = put(store, rows_of(6), start_rows=[{"routed_experts": 10}])
    with pytest.raises(RefError, match=r"holds the rows \[10, 16\)"):
        read_experts(store, [(ref, ["routed_experts"], {"routed_experts": rows})])
    assert backend.get_calls == []


def test_an_empty_row_range_is_legal_at_every_row(store):
    (ref,) = put(store, rows_of(2), start_rows=[{"routed_experts": 10}])
    for row in (10, 11, 12):
        (array,) = read_experts(store, [(ref, ["routed_experts"], {"routed_experts": (row, row)})])
        assert array.shape == (0, 4, 2)


def test_results_outlive_the_objects_and_are_the_callers_own(store):
    (ref,) = put(store, rows_of(6))
    (array,) = read_experts(store, [(ref, ["routed_experts"])])
    store.delete_many([ref])
    array += 1
    assert np.array_equal(array, rows_of(6) + 1)


def test_reading_needs_no_more_memory_than_result_and_one_chunk(backend):
    store = OutputStore(backend, codecs={"routed_experts": NarrowCodec(16)})
    refs = put(store, *[rows_of(100_000)] * 4)  # 0.8 MB stored, 3.2 MB decoded, each
    tracemalloc.start()
    read = read_experts(store, [(ref, ["routed_experts"]) for ref in refs])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < sum(array.nbytes for array in read) + (2 << 20)


def test_no_requests_read_nothing(store, backend):
    assert read_experts(store, []) == []
    with store.get_many([], stash_type=TokenOutputStash) as stashes:
        assert stashes == []
    assert put(store) == []
    store.delete_many([])
    assert backend.put_calls == []


# get_many


def test_views_are_read_only_and_raise_after_the_block(store):
    (ref,) = put(store, rows_of(6))
    with store.get_many([(ref, ["routed_experts"])], stash_type=TokenOutputStash) as (stash,):
        kept = stash.routed_experts
        part = kept[1:3]
        copied = kept.copy()
        total = kept + 0
        assert np.array_equal(kept, rows_of(6))
        with pytest.raises(ValueError, match="read-only"):
            kept[0] = 0
    uses = [
        lambda: stash.routed_experts.shape,
        lambda: stash.routed_experts[0],
        lambda: np.asarray(stash.routed_experts),
        lambda: kept[0],
        lambda: part[0],
        lambda: kept + 1,
        lambda: kept.sum(),
        lambda: kept.copy(),
        lambda: kept.astype(np.int64),
        lambda: list(kept),
        lambda: kept.tolist(),
        lambda: np.concatenate([kept, kept]),
        lambda: np.sort(part),
        lambda: repr(kept),
    ]
    for use in uses:
        with pytest.raises(ReleasedViewError, match="copy what is needed"):
            use()
    assert np.array_equal(copied, rows_of(6))
    assert np.array_equal(total, rows_of(6))


def test_decoded_fields_and_row_ranges_are_lent_too(backend):
    store = OutputStore(backend, codecs={"routed_experts": NarrowCodec(16)})
    (ref,) = put(store, rows_of(6))
    requests = [(ref, ["routed_experts"], {"routed_experts": (1, 3)}), (ref, ["routed_experts"])]
    with store.get_many(requests, stash_type=TokenOutputStash) as (part, whole):
        assert np.array_equal(part.routed_experts, rows_of(6)[1:3])
        assert np.array_equal(whole.routed_experts, rows_of(6))
        kept = part.routed_experts
        with pytest.raises(ValueError, match="read-only"):
            kept[0] = 0
    with pytest.raises(ReleasedViewError):
        kept.max()
    assert len(backend.get_calls) == 1


def test_a_bare_buffer_kept_after_the_block_never_sees_other_bytes(store):
    (ref,) = put(store, rows_of(1000, fill=1))
    with store.get_many([(ref, ["routed_experts"])], stash_type=TokenOutputStash) as (stash,):
        bare = np.asarray(stash.routed_experts)
    store.delete_many([ref])
    for _ in range(10):
        store.delete_many(put(store, rows_of(1000, fill=2)))
    gc.collect()
    assert (bare == 1).all()


def is_released(view):
    try:
        return not len(view)
    except ValueError:
        return True


@pytest.mark.parametrize("codecs", [{}, {"routed_experts": NarrowCodec(16)}], ids=["raw", "narrow"])
def test_a_reader_that_keeps_nothing_leaves_no_view_of_the_backends_memory(backend, codecs):
    store = OutputStore(backend, codecs=codecs)
    refs = put(store, rows_of(6), rows_of(7))
    requests = [(ref, ["routed_experts"], {"routed_experts": (1, 3)}) for ref in refs]
    with store.get_many(requests, stash_type=TokenOutputStash) as stashes:
        assert np.array_equal(stashes[0].routed_experts, rows_of(6)[1:3])
        assert not any(map(is_released, backend.lent_views))
    read = read_experts(store, requests)
    assert len(backend.lent_views) == 4
    assert all(map(is_released, backend.lent_views))
    assert len(read) == 2


def test_an_error_inside_the_block_releases_the_lease(store, backend):
    (ref,) = put(store, rows_of(1))
    with (
        pytest.raises(RuntimeError, match="mine"),
        store.get_many([(ref, ["routed_experts"])], stash_type=TokenOutputStash) as (stash,),
    ):
        raise RuntimeError("mine")
    assert backend.open_leases == 0
    with pytest.raises(ReleasedViewError):
        len(stash.routed_experts)


def test_a_delete_while_views_are_held_leaves_them_readable(store):
    (ref,) = put(store, rows_of(6))
    with store.get_many([(ref, ["routed_experts"])], stash_type=TokenOutputStash) as (stash,):
        store.delete_many([ref])
        assert list(store.list_objects()) == []
        assert np.array_equal(stash.routed_experts, rows_of(6))


# Integrity


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value[:-1], "95 bytes, its reference says 96"),
        (lambda value: b"", "0 bytes"),
        (lambda value: value + b"\0", "97 bytes"),
        (lambda value: value[:50] + bytes([value[50] ^ 1]) + value[51:], "checksum"),
    ],
)
def test_truncated_and_corrupted_bytes_are_typed_errors(store, backend, change, message):
    (ref,) = put(store, rows_of(3))
    backend.tamper(f"{ref.key}/routed_experts", change)
    with pytest.raises(CorruptObjectError, match=message):
        read_experts(store, [(ref, ["routed_experts"])])
    with (
        pytest.raises(CorruptObjectError, match=message),
        store.get_many([(ref, ["routed_experts"])], stash_type=TokenOutputStash),
    ):
        pass
    assert backend.open_leases == 0


def test_a_lost_object_is_a_typed_error_naming_its_key(store):
    refs = put(store, rows_of(3), rows_of(3))
    store.delete_many(refs[:1])
    with pytest.raises(ObjectLostError, match=f"{refs[0].key}/routed_experts"):
        read_experts(store, [(ref, ["routed_experts"]) for ref in refs])
