"""StoreRef: what the wire format says, what is refused, and that the golden references still read."""

import json
import pathlib

import msgspec
import numpy as np
import pytest

from radix_transfer_plugins import FieldSpec, StoreRef, registry
from radix_transfer_plugins.buffers import byte_view, checksum_of
from radix_transfer_plugins.errors import RefError
from radix_transfer_plugins.ref import DTYPES

GOLDEN = pathlib.Path(__file__).parent / "golden"
ABSENT = object()


def plain_ref(**changes):
    """A valid reference with one field, as plain JSON types, with members of the field changed or removed."""
    spec = {
        "dtype": "int32",
        "shape": [3, 4, 2],
        "codec": "raw",
        "stored_bytes": 96,
        "checksum": "crc32:0123abcd",
    }
    spec = {name: value for name, value in {**spec, **changes}.items() if value is not ABSENT}
    return {
        "version": 1,
        "backend": "memory",
        "key": "run-1/output-store/w/0",
        "fields": {"routed_experts": spec},
    }


@pytest.fixture
def golden_ref():
    return json.loads((GOLDEN / "ref_v1.json").read_text())


def test_the_golden_reference_parses_and_is_written_the_same(golden_ref):
    ref = StoreRef.from_builtins(golden_ref)
    assert ref.to_builtins() == golden_ref
    assert ref.version == 1
    assert ref.field_key("routed_experts") == f"{golden_ref['key']}/routed_experts"
    assert set(ref.fields) == {
        *("routed_experts", "indexer_topk"),
        *("sampling_mask_lengths", "sampling_mask_token_ids", "sampling_mask_logprobs"),
    }


@pytest.mark.parametrize("folder", [GOLDEN, GOLDEN / "compact"], ids=["first", "compact"])
def test_the_golden_bytes_decode_to_the_golden_arrays_and_encode_the_same(folder):
    ref = StoreRef.from_builtins(json.loads((folder / "ref_v1.json").read_text()))
    arrays = json.loads((folder / "arrays_v1.json").read_text())
    assert set(arrays) == set(ref.fields)
    for name, spec in ref.fields.items():
        data = (folder / f"{name}.bin").read_bytes()
        assert len(data) == spec.stored_bytes
        assert checksum_of(memoryview(data)) == spec.checksum
        array = np.array(arrays[name], spec.dtype).reshape(spec.shape)
        codec = spec.make_codec()
        decoded = codec.decode(memoryview(data), spec.numpy_dtype, spec.shape, spec.start_row)
        assert np.array_equal(decoded, array)
        assert bytes(byte_view(codec.encode(array, spec.start_row))) == data


@pytest.mark.parametrize("codec", ["experts", "position_blocks", "deltas"])
def test_a_reader_of_the_first_codecs_alone_refuses_the_later_ones_by_name(codec, monkeypatch):
    first = {name: places for name, places in registry._codecs._sources().items() if name != codec}
    monkeypatch.setattr(registry._codecs, "_found", first)
    monkeypatch.setattr(registry._codecs, "_classes", {})
    golden = json.loads((GOLDEN / "compact" / "ref_v1.json").read_text())
    with pytest.raises(RefError, match=f"unknown codec '{codec}'; known codecs: .*positions"):
        StoreRef.from_builtins(golden)


def test_a_ref_with_every_field_is_under_1000_bytes_at_full_size(golden_ref):
    rows, layers, topk, support = 131_071, 61, 2048, 131_072 * 1000
    bit_sets = sum(min(8 * (position // 64 + 1), 4 * topk) for position in range(rows))
    sizes = {
        "routed_experts": ([rows, layers, 8], 2 * rows * layers * 8),
        "indexer_topk": ([rows, layers, topk], -(-rows * layers // 8) + layers * bit_sets),
        "sampling_mask_lengths": ([131_072], 4 * 131_072),
        "sampling_mask_token_ids": ([support], 4 * support),
        "sampling_mask_logprobs": ([support], 4 * support),
    }
    for name, (shape, stored_bytes) in sizes.items():
        golden_ref["fields"][name] |= {"shape": shape, "stored_bytes": stored_bytes, "start_row": 0}
    golden_ref["key"] = "team-a/experiment-2026-10-21/run-17/output-store/6b0c2939-dc096834aa269b3a/1234567"
    golden_ref["backend"] = "shared_memory"
    assert len(json.dumps(StoreRef.from_builtins(golden_ref).to_builtins())) < 1000


def test_json_and_strict_msgpack_keep_a_ref_as_it_is(golden_ref):
    ref = StoreRef.from_builtins(golden_ref)
    plain = ref.to_builtins()
    assert StoreRef.from_builtins(json.loads(json.dumps(plain))) == ref
    packed = msgspec.msgpack.encode(plain)
    assert StoreRef.from_builtins(msgspec.msgpack.decode(packed, strict=True)) == ref
    assert msgspec.convert(plain, StoreRef, strict=True) == ref
    assert only_json_types(plain)


def only_json_types(value):
    if type(value) is dict:
        return all(type(key) is str and only_json_types(item) for key, item in value.items())
    if type(value) is list:
        return all(map(only_json_types, value))
    return type(value) in (str, int, bool)


def test_defaults_are_left_out_and_read_back():
    ref = StoreRef.from_builtins(plain_ref())
    spec = ref.fields["routed_experts"]
    assert (spec.start_row, spec.codec_config, spec.end_row) == (0, {}, 3)
    assert set(ref.to_builtins()["fields"]["routed_experts"]) == {
        "dtype",
        "shape",
        "codec",
        "stored_bytes",
        "checksum",
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_known_to_numpy_under_its_own_name(dtype):
    itemsize = np.dtype(dtype).itemsize
    assert np.dtype(dtype).name == dtype
    StoreRef.from_builtins(plain_ref(dtype=dtype, stored_bytes=24 * itemsize))


FIELD = "$.fields.routed_experts"
BAD_FIELDS = [
    ({"dtype": "object"}, "unknown dtype 'object'; known dtypes: bool, int8", f"{FIELD}.dtype"),
    ({"dtype": "<i4"}, "unknown dtype", f"{FIELD}.dtype"),
    ({"dtype": 4}, "Expected `str`, got `int`", f"{FIELD}.dtype"),
    ({"dtype": ABSENT}, "missing required field `dtype`", FIELD),
    ({"shape": [3, -4, 2]}, "got -4", f"{FIELD}.shape[1]"),
    ({"shape": [3, True, 2]}, "Expected `int`, got `bool`", f"{FIELD}.shape[1]"),
    ({"shape": [3, 4.5, 2]}, "Expected `int`, got `float`", f"{FIELD}.shape[1]"),
    ({"shape": [3, float("nan"), 2]}, "got `float`", f"{FIELD}.shape[1]"),
    ({"shape": [3, "4", 2]}, "got `str`", f"{FIELD}.shape[1]"),
    ({"shape": [3, None, 2]}, "got `null`", f"{FIELD}.shape[1]"),
    ({"shape": 24}, "got `int`", f"{FIELD}.shape"),
    ({"shape": [2**40, 2**40]}, "less than 2^53 bytes", f"{FIELD}.shape"),
    ({"shape": [2**52, 2**52, 0], "stored_bytes": 0}, "less than 2^53 bytes", f"{FIELD}.shape"),
    ({"shape": [10**30]}, "", f"{FIELD}.shape[0]"),
    ({"shape": [1] * 17}, "at most 16 dimensions", f"{FIELD}.shape"),
    ({"shape": [3, 4, 3]}, "in 144 bytes, got stored_bytes 96", FIELD),
    ({"stored_bytes": 95}, "in 96 bytes, got stored_bytes 95", FIELD),
    ({"stored_bytes": -1}, "got -1", f"{FIELD}.stored_bytes"),
    ({"stored_bytes": 10**5000}, "", f"{FIELD}.stored_bytes"),
    ({"start_row": -1}, "got -1", f"{FIELD}.start_row"),
    ({"shape": [], "stored_bytes": 4, "start_row": 1}, "without rows", f"{FIELD}.start_row"),
    (
        {"codec": "zip"},
        "unknown codec 'zip'; known codecs: deltas, experts, narrow",
        f"{FIELD}.codec",
    ),
    ({"codec": "narrow"}, "{'ids': N}", f"{FIELD}.codec_config"),
    ({"codec": "narrow", "codec_config": {"ids": True}}, "got True", f"{FIELD}.codec_config"),
    ({"codec": "narrow", "codec_config": {"ids": 0}}, "got 0", f"{FIELD}.codec_config"),
    ({"codec": "narrow", "codec_config": {"ids": [8]}}, "", f"{FIELD}.codec_config[...]"),
    ({"codec": "narrow", "codec_config": {"ids": 8}}, "in 24 bytes, got stored_bytes 96", FIELD),
    ({"codec": "narrow", "codec_config": {"ids": 8}, "dtype": "float32"}, "float32", FIELD),
    ({"codec": "positions", "shape": [24]}, "[rows, ..., K]", FIELD),
    ({"codec": "positions", "stored_bytes": 99}, "in 34 to 98 bytes, got stored_bytes 99", FIELD),
    ({"codec_config": {"level": 3}}, "takes no configuration", f"{FIELD}.codec_config"),
    ({"codec_config": {"n\u00e4me": 1}}, "ASCII", f"{FIELD}.codec_config"),
    ({"codec_config": {"a": "x" * 200}}, "at most 128", f"{FIELD}.codec_config.a"),
    ({"codec_config": {"a": 2**60}}, "below 2^53", f"{FIELD}.codec_config.a"),
    ({"checksum": "crc32:0123ABCD"}, "lower-case hex", f"{FIELD}.checksum"),
    ({"checksum": "md5:0123"}, "crc32", f"{FIELD}.checksum"),
    ({"checksum": ABSENT}, "missing required field `checksum`", FIELD),
    ({"color": "red"}, "unknown field `color`", FIELD),
]


@pytest.mark.parametrize(("changes", "message", "path"), BAD_FIELDS)
def test_a_bad_field_is_refused_with_its_path(changes, message, path):
    with pytest.raises(RefError) as caught:
        StoreRef.from_builtins(plain_ref(**changes))
    assert message in str(caught.value)
    assert str(caught.value).endswith(f" - at {path}")


BAD_REFS = [
    ({"version": 2}, "unknown version 2; known versions: 1 - at $.version"),
    ({"version": True}, "unknown version True"),
    ({"version": 1.0}, "unknown version 1.0"),
    ({"version": "1"}, "unknown version '1'"),
    ({"version": 10**5000}, "an integer of 16610 bits"),
    (
        {"backend": "redis"},
        "unknown backend 'redis'; known backends: memory, mooncake, shared_memory - at $.backend",
    ),
    ({"backend": None}, "Expected `str`, got `null` - at $.backend"),
    ({"key": "run-1/../other/w/0"}, "at $.key"),
    ({"key": "/run-1/w/0"}, "at $.key"),
    ({"key": "run-1//w/0"}, "at $.key"),
    ({"key": "run-1/./w"}, "at $.key"),
    ({"key": "run-1/w/"}, "at $.key"),
    ({"key": "run-1/w\n"}, "at $.key"),
    ({"key": "run-1\\w"}, "at $.key"),
    ({"key": "r\u00fcn/w"}, "at $.key"),
    ({"key": "run/w\u0000"}, "at $.key"),
    ({"key": ""}, "at $.key"),
    ({"key": "a" * 513}, "at $.key"),
    ({"key": 7}, "at $.key"),
    ({"fields": {"../x": {}}}, "at $.fields"),
    ({"fields": {"a/b": {}}}, "at $.fields"),
    ({"fields": {"": {}}}, "at $.fields"),
    ({"fields": {"\u00fcber": {}}}, "at $.fields"),
    ({"fields": {1: {}}}, "at $.fields"),
    ({"fields": {f"f{index}": {} for index in range(65)}}, "at most 64 fields, got 65"),
    ({"fields": []}, "expected an object, got `list` - at $.fields"),
    ({"fields": {"a": []}}, "at $.fields.a"),
    ({"extra": 1}, "unknown field `extra`"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_REFS)
def test_a_bad_ref_is_refused_with_the_known_choices(changes, message):
    with pytest.raises(RefError) as caught:
        StoreRef.from_builtins({**plain_ref(), **changes})
    assert message in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("data", [None, [], "ref", 1, b"{}", StoreRef])
def test_what_is_no_object_is_refused(data):
    with pytest.raises(RefError, match=r"expected an object, got .* - at \$"):
        StoreRef.from_builtins(data)


@pytest.mark.parametrize("name", ["backend", "key", "fields"])
def test_a_missing_member_is_named(name):
    data = plain_ref()
    del data[name]
    with pytest.raises(RefError, match=f"missing required field `{name}`"):
        StoreRef.from_builtins(data)


def test_a_later_version_is_refused_before_its_members_are_looked_at():
    with pytest.raises(RefError, match="unknown version 2"):
        StoreRef.from_builtins({"version": 2, "location": {}, "fields": "elsewhere"})


def test_sizes_beyond_4_gib_are_legal():
    spec = plain_ref(shape=[2**31, 8], stored_bytes=2**36)["fields"]["routed_experts"]
    ref = StoreRef.from_builtins(plain_ref(shape=[2**31, 8], stored_bytes=2**36))
    assert ref.fields["routed_experts"].array_bytes == 64 << 30
    assert ref.to_builtins()["fields"]["routed_experts"] == spec


def test_specs_made_in_code_are_checked_too():
    with pytest.raises(RefError, match="stored_bytes 3"):
        FieldSpec(dtype="int32", shape=(1,), codec="raw", stored_bytes=3, checksum="crc32:00000000")
    with pytest.raises(RefError, match="unknown backend"):
        StoreRef(backend="redis", key="a/b", fields={})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps(plain_ref(stored_bytes=95)), type=StoreRef)
