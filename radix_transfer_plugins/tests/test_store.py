"""OutputStore:

what goes in comes out, nothing outside its prefix is touched, and nothing is left of what failed.
"""

import gc
import threading
import time
import tracemalloc
import uuid
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from radix_transfer_plugins import (
    OutputStore,
    StoreRef,
    TokenOutputStash,
    create_backend,
    token_output_codecs,
)
from radix_transfer_plugins.backends.memory import MemoryBackend, MemoryConfig
from radix_transfer_plugins.codecs.narrow import NarrowCodec
from radix_transfer_plugins.errors import (
    CodecError,
    ConfigError,
    CorruptObjectError,
    FieldMissingError,
    KeyOutsidePrefixError,
    ObjectLostError,
    ReadBufferError,
    RefError,
    ReleasedViewError,
    StoreFullError,
    StoreUnavailableError,
)


class RecordingBackend(MemoryBackend):
    """The memory backend, telling what it was asked and failing the put it is told to."""

    def __init__(self, **options):
        super().__init__(MemoryConfig(name=uuid.uuid4().hex, wait_s=0.0, key_prefix="run/store", **options))
        self.put_calls = []
        self.get_calls = []
        self.fail_put_number = None
        self.failure = StoreUnavailableError("down")
        self.open_leases = 0
        self.most_open_leases = 0

    def put_batch(self, items):
        self.put_calls.append([key for key, _ in items])
        if len(self.put_calls) == self.fail_put_number:
            raise self.failure
        super().put_batch(items)

    def get_batch(self, keys):
        self.get_calls.append(list(keys))
        lease = super().get_batch(keys)
        self.open_leases += 1
        self.most_open_leases = max(self.most_open_leases, self.open_leases)
        release = lease.release

        def counted():
            self.open_leases -= 1
            release()

        lease.release = counted
        return lease

    def tamper(self, key, change):
        value, created_s = self._space.objects[key]
        self._space.objects[key] = (change(value), created_s)

    def backdate(self, key, seconds):
        value, created_s = self._space.objects[key]
        self._space.objects[key] = (value, created_s - seconds)


@pytest.fixture
def backend():
    return RecordingBackend()


@pytest.fixture
def store(backend):
    return OutputStore(backend)


def rows_of(num_rows, fill=None, seed=0):
    if fill is not None:
        return np.full((num_rows, 4, 2), fill, np.int32)
    return np.random.default_rng(seed).integers(-1, 16, (num_rows, 4, 2), dtype=np.int32)


def put(store, *arrays, **options):
    return store.put_many([TokenOutputStash(routed_experts=array) for array in arrays], **options)


def read_experts(store, requests, buffer_bytes=1 << 20):
    stashes = store.read_many(requests, stash_type=TokenOutputStash, buffer_bytes=buffer_bytes)
    return [stash.routed_experts for stash in stashes]


# Round trips


class Everything(msgspec.Struct, kw_only=True, eq=False):
    """Dtypes and layouts beyond TokenOutputStash."""

    floats: np.ndarray
    flags: np.ndarray | None = None
    scalar: np.ndarray | None = None
    empty: np.ndarray | None = None
    strided: np.ndarray | None = None
    big_endian: np.ndarray | None = None
    absent: np.ndarray | None = None
    made: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(2))


def test_any_struct_of_arrays_is_a_stash_type(store):
    stash = Everything(
        floats=np.array([[1.5, np.nan]], np.float16),
        flags=np.array([True, False]),
        scalar=np.array(7, np.uint64),
        empty=np.empty((3, 0, 2), np.complex64),
        strided=np.arange(20, dtype=np.int16).reshape(4, 5)[::2, ::-2],
        big_endian=np.arange(3, dtype=">i8"),
        made=np.arange(4, dtype=np.uint8),
    )
    (ref,) = store.put_many([stash])
    assert set(ref.fields) == {"floats", "flags", "scalar", "empty", "strided", "big_endian", "made"}
    (back,) = store.read_many([(ref, list(ref.fields))], stash_type=Everything, buffer_bytes=1000)
    for name in ref.fields:
        put_array, read_array = getattr(stash, name), getattr(back, name)
        assert read_array.dtype == put_array.dtype.newbyteorder("=")
        assert np.array_equal(read_array, put_array, equal_nan=name == "floats")
        assert read_array.flags.writeable
    assert back.absent is None


def test_fields_not_asked_for_keep_the_default_of_the_stash_type(store):
    (ref,) = store.put_many([Everything(floats=np.ones(1), flags=np.ones(1, bool))])
    (back,) = store.read_many([(ref, ["floats"])], stash_type=Everything, buffer_bytes=1000)
    assert back.flags is None
    assert np.array_equal(back.made, np.zeros(2))
    with pytest.raises(FieldMissingError, match="without its field 'floats'"):
        store.read_many([(ref, ["flags"])], stash_type=Everything, buffer_bytes=1000)


def test_zero_rows_keep_their_shape_and_differ_from_not_stored(store):
    refs = store.put_many([TokenOutputStash(routed_experts=rows_of(0)), TokenOutputStash()])
    assert refs[0].fields["routed_experts"].shape == (0, 4, 2)
    assert refs[1].fields == {}
    assert read_experts(store, [(refs[0], ["routed_experts"])])[0].shape == (0, 4, 2)
    with pytest.raises(FieldMissingError, match="holds no field 'routed_experts'"):
        read_experts(store, [(refs[1], ["routed_experts"])])
    store.delete_many(refs)


def test_codecs_follow_field_and_model(backend):
    store = OutputStore(backend, codecs=token_output_codecs(num_experts=256, index_topk=4))
    topk = np.array([[[0, -1, -1, -1]], [[1, 0, -1, -1]]], np.int32)
    ids = np.arange(3, dtype=np.int32)
    (ref,) = store.put_many(
        [TokenOutputStash(routed_experts=rows_of(2), indexer_topk=topk, sampling_mask_lengths=ids)]
    )
    assert {name: spec.codec for name, spec in ref.fields.items()} == {
        "routed_experts": "narrow",
        "indexer_topk": "positions",
        "sampling_mask_lengths": "raw",
    }
    # 256 experts leave no code of one byte for -1.
    assert ref.fields["routed_experts"].stored_bytes == 2 * rows_of(2).size
    reader = OutputStore(backend)
    (back,) = reader.read_many([(ref, list(ref.fields))], stash_type=TokenOutputStash, buffer_bytes=1000)
    assert np.array_equal(back.routed_experts, rows_of(2))
    assert np.array_equal(back.indexer_topk, np.array([[[0, -1, -1, -1]], [[0, 1, -1, -1]]]))
    assert token_output_codecs(num_experts=70_000) == {}


def test_one_backend_call_a_stash_and_one_key_a_field(store, backend):
    stash = TokenOutputStash(routed_experts=rows_of(2), sampling_mask_lengths=np.zeros(1, np.int32))
    refs = store.put_many([stash, stash])
    assert backend.put_calls == [
        [f"{ref.key}/routed_experts", f"{ref.key}/sampling_mask_lengths"] for ref in refs
    ]


def test_keys_are_below_the_prefix_and_never_the_same_in_another_store_or_thread(backend):
    stores = [OutputStore(backend) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        refs = [ref for done in pool.map(lambda s: put(s, *[rows_of(1)] * 50), stores) for ref in done]
    assert len({ref.key for ref in refs}) == 200
    assert all(ref.key.startswith("run/store/") for ref in refs)
    OutputStore(backend).delete_many(refs)


# All or nothing


def test_a_put_that_fails_leaves_nothing_of_the_whole_list(store, backend):
    backend.fail_put_number = 3
    with pytest.raises(StoreUnavailableError, match="down"):
        put(store, rows_of(1), rows_of(2), rows_of(3), rows_of(4))
    assert list(store.list_objects()) == []
    assert len(backend.put_calls) == 3


def test_an_interrupt_in_the_middle_of_a_put_leaves_nothing(store, backend):
    backend.fail_put_number = 2
    backend.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        put(store, rows_of(1), rows_of(2))
    assert list(store.list_objects()) == []


def test_a_stash_that_cannot_be_encoded_leaves_nothing_of_the_list(backend):
    store = OutputStore(backend, codecs={"routed_experts": NarrowCodec(8)})
    with pytest.raises(CodecError, match="field 'routed_experts'"):
        put(store, rows_of(3, fill=7), rows_of(3, fill=8))
    assert list(store.list_objects()) == []


def test_a_full_store_fails_the_list_and_leaves_nothing():
    backend = RecordingBackend(capacity_bytes=200)
    store = OutputStore(backend)
    with pytest.raises(StoreFullError, match="need 96 bytes, used 192, free 8, capacity 200"):
        put(store, rows_of(3), rows_of(3), rows_of(3))
    assert backend.stats().used_bytes == 0


def test_cleaning_up_that_fails_is_told_beside_the_first_error(store, backend, monkeypatch):
    backend.fail_put_number = 2

    def refuse(keys):
        raise StoreUnavailableError("still down")

    monkeypatch.setattr(backend, "delete_batch", refuse)
    with pytest.raises(StoreUnavailableError, match=r"^down\n") as caught:
        put(store, rows_of(1), rows_of(2))
    assert "still down" in caught.value.__notes__[0]
    assert backend.put_calls[0][0].rsplit("/", 1)[0] in caught.value.__notes__[0]


# read_many


def test_chunks_hold_at_most_the_buffer_in_order_and_one_lease_at_a_time(store, backend):
    refs = put(store, *[rows_of(n) for n in (1, 2, 3, 4, 1)])  # 32 bytes a row
    arrays = read_experts(store, [(ref, ["routed_experts"]) for ref in refs], buffer_bytes=128)
    keys = [f"{ref.key}/routed_experts" for ref in refs]
    assert backend.get_calls == [keys[:2], keys[2:3], keys[3:4], keys[4:]]
    assert backend.most_open_leases == 1
    assert [len(array) for array in arrays] == [1, 2, 3, 4, 1]


def test_a_field_larger_than_the_buffer_fails_before_anything_is_read(store, backend):
    refs = put(store, rows_of(1), rows_of(5))
    with pytest.raises(ReadBufferError, match="160 bytes, more than buffer_bytes 159"):
        read_experts(store, [(ref, ["routed_experts"]) for ref in refs], buffer_bytes=159)
    assert backend.get_calls == []


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


def test_a_field_is_read_once_however_often_it_is_asked_for_and_nothing_is_shared(store, backend):
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


# Confinement


@pytest.mark.parametrize("key", ["run/store", "run/store-evil/a/0", "run", "other/a", "run/store2/a"])
def test_a_ref_outside_the_prefix_is_neither_read_nor_deleted(backend, key):
    backend.put_batch([(f"{key}/routed_experts", rows_of(1))])
    (good,) = put(OutputStore(backend), rows_of(1))
    evil = msgspec.structs.replace(good, key=key)
    store = OutputStore(backend)
    with pytest.raises(KeyOutsidePrefixError, match="run/store"):
        read_experts(store, [(good, ["routed_experts"]), (evil, ["routed_experts"])])
    with pytest.raises(KeyOutsidePrefixError):
        store.delete_many([good, evil])
    assert backend.get_calls == []
    assert {info.key for info in backend.list("")} == {f"{key}/routed_experts", f"{good.key}/routed_experts"}


def test_sweeping_touches_only_what_is_below_the_prefix(backend):
    outside = ["other/a/0/x", "run/store-evil/a/0/x", "run/x", "run/store2/x"]
    backend.put_batch([(key, b"theirs") for key in outside])
    store = OutputStore(backend)
    put(store, rows_of(1))
    assert store.delete_objects(older_than_s=0) == 1
    assert sorted(info.key for info in backend.list("")) == sorted(outside)


def test_a_ref_of_another_backend_is_refused(store, backend):
    (ref,) = put(store, rows_of(1))
    foreign = msgspec.structs.replace(ref, backend="mooncake")
    with pytest.raises(RefError, match="backend 'mooncake', this store is of 'memory'"):
        read_experts(store, [(foreign, ["routed_experts"])])
    with pytest.raises(RefError, match="of backend 'mooncake'"):
        store.delete_many([foreign])
    with pytest.raises(RefError, match=r"StoreRef\.from_builtins"):
        read_experts(store, [(ref.to_builtins(), ["routed_experts"])])


def test_two_refs_that_describe_one_object_differently_are_refused(store):
    (ref,) = put(store, rows_of(1))
    spec = msgspec.structs.replace(ref.fields["routed_experts"], shape=(4, 1, 2))
    other = msgspec.structs.replace(ref, fields={"routed_experts": spec})
    with pytest.raises(RefError, match="differently"):
        read_experts(store, [(ref, ["routed_experts"]), (other, ["routed_experts"])])


def test_max_array_bytes_bounds_what_a_ref_makes_the_reader_allocate(backend):
    (ref,) = put(OutputStore(backend), rows_of(6))
    store = OutputStore(backend, max_array_bytes=100)
    with pytest.raises(RefError, match="192 bytes, more than max_array_bytes 100"):
        read_experts(store, [(ref, ["routed_experts"])])
    assert backend.get_calls == []
    (part,) = read_experts(store, [(ref, ["routed_experts"], {"routed_experts": (0, 3)})])
    assert len(part) == 3


# Housekeeping


def test_list_and_delete_by_age(store, backend):
    refs = put(store, rows_of(1), rows_of(2))
    backend.backdate(f"{refs[0].key}/routed_experts", 7200)
    assert [info.stored_bytes for info in store.list_objects(older_than_s=3600)] == [32]
    assert store.delete_objects(older_than_s=3600) == 1
    assert [info.key for info in store.list_objects()] == [f"{refs[1].key}/routed_experts"]


def test_delete_is_idempotent(store):
    refs = put(store, rows_of(1))
    store.delete_many(refs)
    store.delete_many(refs + refs)


def test_statistics_count_objects_bytes_and_seconds(store):
    refs = put(store, rows_of(1), rows_of(2))
    read_experts(store, [(refs[0], ["routed_experts"])] * 3)
    store.delete_many(refs)
    stats = store.stats()
    assert (stats.objects_put, stats.bytes_put) == (2, 96)
    assert (stats.objects_read, stats.bytes_read) == (1, 32)
    assert stats.objects_deleted == 2
    assert 0 < stats.put_s < 10
    assert 0 < stats.read_s < 10
    assert 0 < stats.delete_s < 10


def test_threads_share_one_store(store):
    def work(worker):
        for turn in range(10):
            (ref,) = put(store, rows_of(5, seed=worker * 100 + turn))
            (array,) = read_experts(store, [(ref, ["routed_experts"])])
            assert np.array_equal(array, rows_of(5, seed=worker * 100 + turn))
            store.delete_many([ref])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert list(store.list_objects()) == []
    assert store.stats().objects_put == 80


def test_a_put_that_waits_for_room_goes_on_when_a_reader_deletes():
    name = uuid.uuid4().hex
    store = OutputStore(create_backend("memory", {"name": name, "capacity_bytes": 200, "wait_s": 10}))
    refs = put(store, rows_of(6))
    timer = threading.Timer(0.2, store.delete_many, [refs])
    began = time.monotonic()
    timer.start()
    (ref,) = put(store, rows_of(6))
    timer.join()
    assert time.monotonic() - began < 5
    store.delete_many([ref])


@pytest.mark.parametrize(
    ("start_rows", "message"),
    [
        ([], "expected 1 entries"),
        ([{"routed_expert": 1}], "no field 'routed_expert'"),
        ([{"routed_experts": -1}], "row >= 0"),
        ([{"routed_experts": True}], "row >= 0"),
    ],
)
def test_bad_start_rows_are_refused(store, start_rows, message):
    with pytest.raises(ConfigError, match=message):
        put(store, rows_of(1), start_rows=start_rows)
    assert list(store.list_objects()) == []


@pytest.mark.parametrize("value", [[1, 2], 3, "text", np.float32(1)])
def test_what_is_no_array_is_refused(store, value):
    with pytest.raises(CodecError, match="expected a numpy array or None"):
        put(store, value)
    with pytest.raises(CodecError, match="msgspec Struct"):
        store.put_many([{"routed_experts": rows_of(1)}])


@pytest.mark.parametrize(
    "key_prefix", ["", "/run", "run/", "run//store", "run/../store", "run store", "rün", "a" * 300, 3]
)
def test_a_prefix_that_would_need_normalising_is_refused(backend, key_prefix):
    with pytest.raises(ConfigError, match="key_prefix"):
        OutputStore(backend, key_prefix=key_prefix)
