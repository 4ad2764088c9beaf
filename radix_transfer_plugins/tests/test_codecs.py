"""raw, narrow and positions pass the conformance suite; beside it, what is particular to each."""

import numpy as np
import pytest

from radix_transfer_plugins.buffers import byte_view
from radix_transfer_plugins.codecs.narrow import NarrowCodec
from radix_transfer_plugins.codecs.positions import PositionsCodec
from radix_transfer_plugins.codecs.raw import RawCodec
from radix_transfer_plugins.errors import CodecError, ConfigError, CorruptObjectError, RefError
from radix_transfer_plugins.testing import CodecConformance

INT32 = np.dtype("int32")


class TestRaw(CodecConformance):
    def make_codec(self):
        return RawCodec()

    def accepted(self):
        numbers = np.arange(24)
        kinds = ("int8", "uint16", "int32", "uint64", "float16", "float32", "float64", "complex64", "bool")
        return [
            *((numbers.reshape(2, 3, 4).astype(kind), 0) for kind in kinds),
            (np.array([np.nan, np.inf, -0.0], np.float32), 5),
            (np.empty((0, 48, 8), np.int32), 7),
            (np.arange(5, dtype=np.int64), 0),
            (np.array(7, np.int32), 0),
        ]

    def rejected(self):
        return [
            (np.array(["text"]), 0),
            (np.array([object()]), 0),
            (np.array(["2026-01-01"], "datetime64[s]"), 0),
        ]

    def test_a_boolean_is_stored_as_0_or_1_and_nothing_else_is_one(self):
        with pytest.raises(CorruptObjectError):
            RawCodec().decode(memoryview(b"\x00\x02"), np.dtype(bool), (2,), 0)

    def test_decoding_copies_nothing(self):
        data = memoryview(bytes(12))
        assert np.shares_memory(RawCodec().decode(data, INT32, (3,), 0), np.frombuffer(data, np.uint8))


class TestNarrowByte(CodecConformance):
    ids = 255

    def make_codec(self):
        return NarrowCodec(self.ids)

    def accepted(self):
        rng = np.random.default_rng(0)
        rows = rng.integers(-1, self.ids, (37, 6, 8))
        edges = np.array([[-1, 0], [self.ids - 1, 0]])
        return [
            (rows.astype(np.int32), 0),
            (rows.astype(np.int64), 11),
            (edges.astype(np.int32), 0),
            (np.arange(self.ids).astype(np.uint16).reshape(-1, 1), 0),
            (np.empty((0, 6, 8), np.int32), 3),
            (np.full((300_000,), -1, np.int32), 0),
        ]

    def rejected(self):
        return [
            (np.array([[0, self.ids]], np.int32), 0),
            (np.array([[0, -2]], np.int32), 0),
            (np.array([[0, self.ids + 65536]], np.int64), 0),
            (np.array([[0.0]], np.float32), 0),
            (np.array([[True]]), 0),
        ]


class TestNarrowSignedByte(TestNarrowByte):
    ids = 128


class TestNarrowTwoBytes(TestNarrowByte):
    ids = 65535


class TestNarrowSignedTwoBytes(TestNarrowByte):
    ids = 512


@pytest.mark.parametrize(("ids", "itemsize"), [(1, 1), (254, 1), (255, 1), (256, 2), (512, 2), (65535, 2)])
def test_narrow_width_follows_from_the_declared_ids_alone(ids, itemsize):
    data = byte_view(NarrowCodec(ids).encode(np.zeros(10, np.int32), 0))
    assert data.nbytes == 10 * itemsize


def test_narrow_wire_bytes_are_little_endian_codes_with_the_largest_for_minus_one():
    assert bytes(byte_view(NarrowCodec(128).encode(np.array([0, 127, -1], np.int32), 0))) == b"\x00\x7f\xff"
    assert (
        bytes(byte_view(NarrowCodec(512).encode(np.array([1, 511, -1], np.int32), 0)))
        == b"\1\0\xff\1\xff\xff"
    )


@pytest.mark.parametrize("ids", [0, -1, 65536, True, "8", 2.0])
def test_narrow_refuses_a_range_that_two_bytes_cannot_hold(ids):
    with pytest.raises(ConfigError, match="raw"):
        NarrowCodec(ids)


def test_narrow_code_that_is_no_id_is_corruption():
    with pytest.raises(CorruptObjectError):
        NarrowCodec(128).decode(memoryview(b"\x80"), INT32, (1,), 0)
    with pytest.raises(CorruptObjectError):
        NarrowCodec(128).decode(memoryview(b"\xff"), np.dtype("uint8"), (1,), 0)


def causal_rows(start_row, num_rows, num_sets, width, seed=0):
    """Rows as an indexer writes them:

    the whole prefix while it fits, then `width` random positions of it, unordered.
    """
    rng = np.random.default_rng(seed)
    rows = np.full((num_rows, num_sets, width), -1, np.int32)
    for row in range(num_rows):
        position = start_row + row
        for index in range(num_sets):
            count = min(width, position + 1)
            kept = np.arange(count) if position < width else rng.permutation(position + 1)[:count]
            rows[row, index, :count] = kept
    return rows


class TestPositions(CodecConformance):
    def make_codec(self):
        return PositionsCodec()

    def accepted(self):
        rng = np.random.default_rng(1)
        ragged = causal_rows(0, 90, 3, 16)
        ragged[rng.random(ragged.shape) < 0.3] = -1
        return [
            (causal_rows(0, 200, 3, 16), 0),
            (causal_rows(150, 40, 2, 16), 150),
            (causal_rows(0, 30, 2, 8).astype(np.int64), 0),
            (ragged, 0),
            (causal_rows(5, 70, 1, 64)[:, 0], 5),
            (causal_rows(0, 12, 4, 8).reshape(12, 2, 2, 8), 0),
            # Far along, where a list of positions is shorter than a bit set.
            (causal_rows(60_000, 3, 2, 4), 60_000),
            (causal_rows(0, 300, 2, 1), 0),
            (np.full((5, 2, 8), -1, np.int32), 1000),
            (np.empty((0, 2, 8), np.int32), 9),
            (np.empty((4, 0, 8), np.int32), 0),
            (np.empty((4, 2, 0), np.int32), 0),
        ]

    def rejected(self):
        return [
            (np.array([[[1, -1]]], np.int32), 0),
            (np.array([[[0, -2]]], np.int32), 5),
            (np.array([[[3, 3]]], np.int32), 5),
            (np.array([[[70_000, 70_000]]], np.int32), 70_000),
            (np.array([[[70_001, 0]]], np.int32), 70_000),
            (np.array([[[0, 1]]], np.int32), 2**31),
            (np.array([0, 1], np.int32), 5),
            (np.array([[0.0]]), 0),
        ]


def test_positions_whole_prefixes_cost_one_bit_whatever_their_order():
    rows = causal_rows(0, 64, 8, 64)
    shuffled = rows.copy()
    for row in range(64):
        shuffled[row] = shuffled[row][:, np.random.default_rng(row).permutation(64)]
    assert byte_view(PositionsCodec().encode(rows, 0)).nbytes == 64
    assert bytes(byte_view(PositionsCodec().encode(shuffled, 0))) == bytes(
        byte_view(PositionsCodec().encode(rows, 0))
    )


def test_positions_wire_bytes_are_flags_then_bit_sets():
    # Row 0 whole; row 1 {1}: bit 1 of the first byte of a 64-bit word.
    rows = np.array([[[0, -1]], [[1, -1]]], np.int32)
    assert bytes(byte_view(PositionsCodec().encode(rows, 0))) == b"\x01" + b"\x02" + bytes(7)
    # Position 100 with K = 2: the list, ascending, since 16 bytes of bits are more than 8 of positions.
    far = np.array([[[100, 7]]], np.int32)
    assert bytes(byte_view(PositionsCodec().encode(far, 100))) == b"\x00" + b"\x07\0\0\0" + b"\x64\0\0\0"


@pytest.mark.parametrize(
    "data",
    [
        b"\x02" + bytes(8),  # padding flag set
        b"\x00" + b"\x04" + bytes(7),  # position 2 in the row of position 1
        b"\x00" + b"\x03" + bytes(7),  # two positions where K is 1
    ],
)
def test_positions_bytes_that_no_row_can_hold_are_corruption(data):
    with pytest.raises(CorruptObjectError):
        PositionsCodec().decode(memoryview(data), INT32, (1, 1, 1 if data[1] == 3 else 2), 1)


def test_positions_check_bounds_the_stored_bytes_from_both_sides():
    codec = PositionsCodec()
    # 10 rows from position 0 with K = 4: rows 0 to 3 may be whole, the 6 others take 8 bytes each; 2 bytes of
    # flags.
    for stored_bytes in (2 + 6 * 8, 2 + 10 * 8):
        codec.check(INT32, (10, 1, 4), stored_bytes, 0)
    for stored_bytes in (2 + 6 * 8 - 1, 2 + 10 * 8 + 1):
        with pytest.raises(RefError):
            codec.check(INT32, (10, 1, 4), stored_bytes, 0)


def test_positions_scratch_memory_is_bounded_for_long_contexts(monkeypatch):
    rows = causal_rows(5000, 70, 3, 700)
    whole = byte_view(PositionsCodec().encode(rows, 5000))
    monkeypatch.setattr("radix_transfer_plugins.codecs.positions._SCRATCH_ITEMS", 1)
    assert byte_view(PositionsCodec().encode(rows, 5000)) == whole
    decoded = PositionsCodec().decode(whole, INT32, rows.shape, 5000)
    assert np.array_equal(decoded, np.sort(rows, axis=-1))


def test_codec_errors_tell_the_row_and_the_remedy():
    with pytest.raises(CodecError, match=r"position 5 may hold positions from -1 to 5.*start_row"):
        PositionsCodec().encode(np.array([[[0, 6]]], np.int32), 5)
    with pytest.raises(CodecError, match=r"ids in \[-1, 8\), got values from 0 to 8"):
        NarrowCodec(8).encode(np.array([0, 8], np.int32), 0)
