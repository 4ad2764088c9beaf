"""OutputStore: what goes in comes out, failures leave nothing, and nothing outside the prefix is touched."""

import threading
import time
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from radix_transfer_plugins import (
    FieldSpec,
    OutputStore,
    StoreRef,
    TokenOutputStash,
    create_backend,
    token_output_codecs,
)
from radix_transfer_plugins import store as store_module
from radix_transfer_plugins.codecs.narrow import NarrowCodec
from radix_transfer_plugins.codecs.raw import RawCodec
from radix_transfer_plugins.errors import (
    CodecError,
    ConfigError,
    FieldMissingError,
    KeyOutsidePrefixError,
    RefError,
    StoreFullError,
    StoreUnavailableError,
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
    store = OutputStore(backend, codecs=token_output_codecs(num_experts=300, index_topk=4, vocab_size=3))
    topk = np.array([[[0, -1, -1, -1]], [[1, 0, -1, -1]]], np.int32)
    ids = np.arange(3, dtype=np.int32)
    (ref,) = store.put_many(
        [
            TokenOutputStash(
                routed_experts=rows_of(2),
                indexer_topk=topk,
                sampling_mask_lengths=ids,
                sampling_mask_token_ids=ids,
            )
        ]
    )
    assert {name: spec.codec for name, spec in ref.fields.items()} == {
        "routed_experts": "narrow",
        "indexer_topk": "position_blocks",
        "sampling_mask_lengths": "raw",
        "sampling_mask_token_ids": "deltas",
    }
    assert ref.fields["routed_experts"].stored_bytes == 2 * rows_of(2).size
    reader = OutputStore(backend)
    (back,) = reader.read_many([(ref, list(ref.fields))], stash_type=TokenOutputStash, buffer_bytes=1000)
    assert np.array_equal(back.routed_experts, rows_of(2))
    assert np.array_equal(back.indexer_topk, np.array([[[0, -1, -1, -1]], [[0, 1, -1, -1]]]))
    assert token_output_codecs(num_experts=70_000) == {}


@pytest.mark.parametrize(
    ("model", "codec"),
    [
        ({"num_experts": 255, "num_layers": 4}, "narrow"),
        ({"num_experts": 128, "num_layers": 4, "dense_layers": [0]}, "experts"),
        ({"num_experts": 256, "num_layers": 4}, "experts"),
        ({"num_experts": 256}, "narrow"),
        ({"num_experts": 257, "num_layers": 4, "dense_layers": [0]}, "narrow"),
    ],
)
def test_experts_take_the_smallest_codec_that_their_model_allows(model, codec):
    assert token_output_codecs(**model)["routed_experts"].name == codec


@pytest.fixture
def one_call_a_stash(monkeypatch):
    """As with stashes of a megabyte and more."""
    monkeypatch.setattr(store_module, "_SHARED_CALL_BYTES", 1)


def test_one_backend_call_a_stash_and_one_key_a_field(store, backend, one_call_a_stash):
    stash = TokenOutputStash(routed_experts=rows_of(2), sampling_mask_lengths=np.zeros(1, np.int32))
    refs = store.put_many([stash, stash])
    assert backend.put_calls == [
        [f"{ref.key}/routed_experts", f"{ref.key}/sampling_mask_lengths"] for ref in refs
    ]


def test_small_stashes_share_backend_calls(store, backend, monkeypatch):
    monkeypatch.setattr(store_module, "_SHARED_CALL_BYTES", 2 * rows_of(3).nbytes)
    refs = put(store, *[rows_of(3)] * 5)
    keys = [f"{ref.key}/routed_experts" for ref in refs]
    assert backend.put_calls == [keys[:2], keys[2:4], keys[4:]]
    assert len(read_experts(store, [(ref, ["routed_experts"]) for ref in refs])) == 5


def test_a_shared_call_that_fails_leaves_nothing_of_the_list(store, backend, monkeypatch):
    monkeypatch.setattr(store_module, "_SHARED_CALL_BYTES", 2 * rows_of(3).nbytes)
    backend.fail_put_number = 2
    with pytest.raises(StoreUnavailableError, match="down"):
        put(store, *[rows_of(3)] * 5)
    assert list(store.list_objects()) == []


def test_keys_are_below_the_prefix_and_never_the_same_in_another_store_or_thread(backend):
    stores = [OutputStore(backend) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        refs = [ref for done in pool.map(lambda s: put(s, *[rows_of(1)] * 50), stores) for ref in done]
    assert len({ref.key for ref in refs}) == 200
    assert all(ref.key.startswith("run/store/") for ref in refs)
    OutputStore(backend).delete_many(refs)


# All or nothing


def test_a_put_that_fails_leaves_nothing_of_the_whole_list(store, backend, one_call_a_stash):
    backend.fail_put_number = 3
    with pytest.raises(StoreUnavailableError, match="down"):
        put(store, rows_of(1), rows_of(2), rows_of(3), rows_of(4))
    assert list(store.list_objects()) == []
    assert len(backend.put_calls) == 3


def test_an_interrupt_in_the_middle_of_a_put_leaves_nothing(store, backend, one_call_a_stash):
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


def test_a_full_store_fails_the_list_and_leaves_nothing(make_backend, one_call_a_stash):
    backend = make_backend(capacity_bytes=200)
    store = OutputStore(backend)
    with pytest.raises(StoreFullError, match="need 96 bytes, used 192, free 8, capacity 200"):
        put(store, rows_of(3), rows_of(3), rows_of(3))
    assert backend.stats().used_bytes == 0


def test_cleaning_up_that_fails_is_told_beside_the_first_error(store, backend, monkeypatch, one_call_a_stash):
    backend.fail_put_number = 2

    def refuse(keys):
        raise StoreUnavailableError("still down")

    monkeypatch.setattr(backend, "delete_batch", refuse)
    with pytest.raises(StoreUnavailableError, match=r"^down\n") as caught:
        put(store, rows_of(1), rows_of(2))
    assert "still down" in caught.value.__notes__[0]
    assert backend.put_calls[0][0].rsplit("/", 1)[0] in caught.value.__notes__[0]


# Confinement


@pytest.mark.parametrize("key", ["run/store", "run/store-evil/a/0", "run", "other/a", "run/store2/a"])
def test_a_ref_outside_the_prefix_is_neither_read_nor_deleted(backend, key):
    backend.put_batch([(f"{key}/routed_experts", rows_of(1))])
    (good,) = put(OutputStore(backend), rows_of(1))
    evil = msgspec.structs.replace(good, key=key)
    store = OutputStore(backend)
    with pytest.raises(KeyOutsidePrefixError, match="run/store"):
        read_experts(store, [(good, ["routed_experts"]), (evil, ["routed_experts"])])
    assert backend.get_calls == []
    with pytest.raises(KeyOutsidePrefixError, match=r"1 of 3 references were not deleted.*run/store"):
        store.delete_many([good, evil, good])
    assert {info.key for info in backend.list("")} == {f"{key}/routed_experts"}


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
        store.delete_many([foreign, ref])
    assert list(store.list_objects()) == []
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


def test_a_few_bytes_that_claim_terabytes_are_refused_before_they_are_read(backend):
    """Flags of whole causal prefixes: 128 KiB that stand for 4 TiB."""
    width = 1 << 20
    flags = b"\xff" * (width // 8)
    key = "run/store/forged"
    backend.put_batch([(f"{key}/indexer_topk", flags)])
    spec = FieldSpec(
        dtype="int32",
        shape=(width, 1, width),
        codec="positions",
        stored_bytes=len(flags),
        checksum=f"crc32:{zlib.crc32(flags):08x}",
    )
    ref = StoreRef(backend="memory", key=key, fields={"indexer_topk": spec})
    with pytest.raises(RefError, match="max_array_bytes"):
        OutputStore(backend).read_many(
            [(ref, ["indexer_topk"])], stash_type=TokenOutputStash, buffer_bytes=1 << 30
        )
    assert backend.get_calls == []


def test_an_array_that_memory_cannot_hold_is_a_typed_error(store, backend, monkeypatch):
    (ref,) = put(store, rows_of(6))

    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr(RawCodec, "decode", refuse)
    with pytest.raises(RefError, match="192 bytes when decoded"):
        read_experts(store, [(ref, ["routed_experts"])])


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


@pytest.mark.parametrize("array", [np.zeros(2, np.longdouble), np.zeros((1,) * 17, np.int8)])
def test_what_no_reference_can_describe_is_a_codec_error_naming_the_field(store, array):
    with pytest.raises(CodecError, match="field 'routed_experts'"):
        put(store, array)


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
