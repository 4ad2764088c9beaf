"""Every codec passes the conformance suite; beside it, what is particular to each."""

import numpy as np
import pytest

from radix_transfer_plugins.buffers import byte_view
from radix_transfer_plugins.codecs.deltas import DeltasCodec
from radix_transfer_plugins.codecs.experts import ExpertsCodec
from radix_transfer_plugins.codecs.narrow import NarrowCodec
from radix_transfer_plugins.codecs.positions import PositionBlocksCodec, PositionsCodec
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


@pytest.mark.parametrize(
    ("ids", "dtype", "narrowest"),
    [
        (128, "int32", "int8"),
        (129, "int32", "int16"),
        (128, "int8", "int8"),
        (32768, "int64", "int16"),
        (32769, "int64", "int32"),
        (100, "uint32", "uint32"),
    ],
)
def test_the_narrowest_type_of_ids_is_signed_and_holds_minus_one(ids, dtype, narrowest):
    assert NarrowCodec(ids).narrowest(np.dtype(dtype)) == np.dtype(narrowest)


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


class TestPositionBlocks(TestPositions):
    def make_codec(self):
        return PositionBlocksCodec()

    def accepted(self):
        rng = np.random.default_rng(2)
        far = causal_rows(4000, 300, 2, 96)
        ragged = far.copy()
        ragged[rng.random(ragged.shape) < 0.3] = -1
        empty_at_end = causal_rows(900, 40, 1, 16)
        empty_at_end[-1] = -1
        whole_blocks = np.arange(600, dtype=np.int32)[None, None] + np.arange(510, 1530, 170)[:, None, None]
        return [
            *super().accepted(),
            # Counts and low parts by block, over several blocks of 255.
            (far, 4000),
            (ragged, 4000),
            (far.astype(np.int64), 4000),
            (empty_at_end, 900),
            (np.where(whole_blocks < 2040, whole_blocks, -1), 5000),
            (causal_rows(250, 600, 1, 40), 250),
        ]


class TestExperts(CodecConformance):
    def make_codec(self):
        return ExpertsCodec(256, 5, frozenset({0}))

    def accepted(self):
        rng = np.random.default_rng(3)
        rows = rng.integers(0, 256, (37, 5, 8)).astype(np.int32)
        rows[:, 0] = -1
        missing = rows.copy()
        missing[[0, 7, 8, 36]] = -1
        partly = missing.copy()
        partly[3, 2] = -1
        partly[7, 1, 0] = 5
        partly[20, 4, 7] = -1
        return [
            (rows, 0),
            (rows.astype(np.int64), 11),
            (missing, 4),
            (partly.astype(np.int16), 2),
            (np.full((9, 5, 2), -1, np.int32), 0),
            (np.empty((0, 5, 8), np.int32), 3),
            (np.empty((4, 5, 0), np.int32), 0),
            (
                np.where(np.arange(5)[:, None] == 0, -1, rng.integers(0, 256, (9000, 5, 8))).astype(np.int32),
                0,
            ),
        ]

    def rejected(self):
        return [
            (np.full((1, 5, 1), 256, np.int32), 0),
            (np.full((1, 5, 1), -2, np.int32), 0),
            (np.full((1, 5, 1), 0, np.int32), 0),
            (np.full((1, 4, 1), -1, np.int32), 0),
            (np.full((1, 5), -1, np.int32), 0),
            (np.full((1, 5, 1), -1, np.int8), 0),
            (np.full((1, 5, 1), -1.0, np.float32), 0),
        ]


class TestExpertsOfScatteredLayers(TestExperts):
    def make_codec(self):
        return ExpertsCodec(200, 5, frozenset({0, 2}))

    def accepted(self):
        dense = np.isin(np.arange(5), [0, 2])[:, None]
        rows = [np.where(dense | (array >= 200), -1, array) for array, _ in super().accepted()]
        return [(array, start) for array, (_, start) in zip(rows, super().accepted(), strict=True)]


class TestDeltas(CodecConformance):
    def make_codec(self):
        return DeltasCodec(151_936)

    def accepted(self):
        rng = np.random.default_rng(4)
        ascending = np.concatenate([np.sort(rng.choice(151_936, n, replace=False)) for n in (1, 3, 50, 4000)])
        return [
            (ascending.astype(np.int32), 0),
            (rng.permutation(ascending).astype(np.int64), 7),
            (rng.integers(0, 151_936, 70_001).astype(np.uint32), 0),
            (np.array([0, 151_935, 0, 127, 0, 128, 0, 32_768], np.int32), 0),
            (rng.integers(0, 9, (5, 3)).astype(np.int32), 0),
            (np.empty(0, np.int32), 2),
        ]

    def rejected(self):
        return [
            (np.array([-1], np.int32), 0),
            (np.array([151_936], np.int32), 0),
            (np.array([0], np.int16), 0),
            (np.array([0.0], np.float32), 0),
        ]


class TestDeltasOfTheWidestRange(TestDeltas):
    def make_codec(self):
        return DeltasCodec(1 << 30)

    def accepted(self):
        return [
            (np.array([0, (1 << 30) - 1, 0, 1 << 24], np.int32), 0),
            (np.empty((0, 3), np.int64), 1),
            (np.array([[(1 << 30) - 1]], np.int32), 0),
        ]

    def rejected(self):
        return [(np.array([1 << 30], np.int32), 0)]


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
    monkeypatch.setattr("radix_transfer_plugins.codecs.positions.codec._SCRATCH_ITEMS", 1)
    assert byte_view(PositionsCodec().encode(rows, 5000)) == whole
    decoded = PositionsCodec().decode(whole, INT32, rows.shape, 5000)
    assert np.array_equal(decoded, np.sort(rows, axis=-1))


def test_codec_errors_tell_the_row_and_the_remedy():
    with pytest.raises(CodecError, match=r"position 5 may hold positions from -1 to 5.*start_row"):
        PositionsCodec().encode(np.array([[[0, 6]]], np.int32), 5)
    with pytest.raises(CodecError, match=r"ids in \[-1, 8\), got values from 0 to 8"):
        NarrowCodec(8).encode(np.array([0, 8], np.int32), 0)


def test_position_blocks_wire_bytes_are_counts_then_places():
    # Position 1000 with K = 4: 4 blocks of 255 positions. 7 and 254 are in block 0, 255 in block 1.
    row = np.array([[[255, 7, -1, 254]]], np.int32)
    stored = bytes(byte_view(PositionBlocksCodec().encode(row, 1000)))
    assert stored == b"\x00" + b"\x02\x01\x00\x00" + b"\x07\xfe\x00\xff"


@pytest.mark.parametrize(
    "payload",
    [
        b"\x02\x01\x00\x00" + b"\xfe\x07\x00\xff",  # places that do not ascend
        b"\x02\x01\x00\x00" + b"\x07\xfe\x00\x00",  # a place beyond the counts
        b"\x02\x01\x00\x00" + b"\x07\xff\x00\xff",  # a place that no block has
        b"\x05\x00\x00\x00" + b"\x00\x01\x02\x03",  # more members than K
        b"\x01\x01\x01\x01" + b"\x00\x01\x02\xfe",  # position 1019 in the row of position 1000
    ],
)
def test_position_blocks_bytes_that_no_row_can_hold_are_corruption(payload):
    with pytest.raises(CorruptObjectError):
        PositionBlocksCodec().decode(memoryview(b"\0" + payload), INT32, (1, 1, 4), 1000)


@pytest.mark.parametrize(("start_row", "of_int32"), [(0, 0.06), (32_768, 0.28), (131_072, 0.33)])
def test_position_blocks_take_these_parts_of_int32_at_any_length(start_row, of_int32):
    num_rows = 3071 if start_row == 0 else 3
    shape = (num_rows, 1, 2048)
    most = 10**12
    with pytest.raises(RefError) as refused:
        PositionBlocksCodec().check(INT32, shape, most, start_row)
    least_bytes = int(str(refused.value).split(" in ")[1].split(" to ")[0])
    assert least_bytes / (4 * num_rows * 2048) <= of_int32
    rows = causal_rows(start_row, num_rows, 1, 2048) if start_row else None
    if rows is not None:
        assert byte_view(PositionBlocksCodec().encode(rows, start_row)).nbytes == least_bytes


def test_experts_wire_bytes_are_missing_rows_then_ids_then_places_of_minus_one():
    # Layer 0 never routes; row 1 is missing; the second item of row 2 is absent.
    rows = np.array([[[-1, -1], [255, 3]], [[-1, -1], [-1, -1]], [[-1, -1], [7, -1]]], np.int32)
    codec = ExpertsCodec(256, 2, frozenset({0}))
    assert codec.get_config() == {"experts": 256, "layers": 2, "dense_layers": "1"}
    stored = bytes(byte_view(codec.encode(rows, 0)))
    assert stored == b"\x02" + b"\xff\x03" + b"\x00\x00" + b"\x07\x00" + b"\x05" + bytes(7)


def test_experts_of_a_256_expert_model_take_a_byte_each():
    rows = np.zeros((3071, 61, 8), np.int32)
    rows[:, :3] = -1
    stored = byte_view(ExpertsCodec(256, 61, frozenset({0, 1, 2})).encode(rows, 0))
    assert stored.nbytes / rows.nbytes <= 0.26


@pytest.mark.parametrize(
    "data",
    [
        b"\x08" + bytes(6),  # a flag of a row that there is not
        b"\x01" + b"\x09" + bytes(5),  # an id in a missing row
        b"\x00" + b"\x09" + bytes(5) + bytes(8),  # an id where a -1 is
        b"\x00" + bytes(6) + b"\x06" + bytes(7),  # a place outside
        b"\x00" + bytes(6) + 2 * (b"\x01" + bytes(7)),  # places that do not ascend
        b"\x00" + b"\xc8" + bytes(5),  # 200 of 200 experts
    ],
)
def test_experts_bytes_that_no_rows_have_are_corruption(data):
    codec = ExpertsCodec(200, 2, frozenset({0}))
    with pytest.raises(CorruptObjectError):
        codec.decode(memoryview(data), INT32, (3, 2, 2), 0)


@pytest.mark.parametrize(
    "config",
    [
        {"experts": 257, "layers": 2, "dense_layers": "0"},
        {"experts": True, "layers": 2, "dense_layers": "0"},
        {"experts": 8, "layers": 481, "dense_layers": "0"},
        {"experts": 8, "layers": 2, "dense_layers": "4"},
        {"experts": 8, "layers": 2, "dense_layers": "-1"},
        {"experts": 8, "layers": 2, "dense_layers": "x"},
        {"experts": 8, "layers": 2, "dense_layers": 1},
        {"experts": 8, "layers": 2},
    ],
)
def test_experts_refuse_a_configuration_that_no_model_has(config):
    with pytest.raises(ConfigError, match="codec 'experts'"):
        ExpertsCodec.from_config(config)


def test_deltas_wire_bytes_are_lengths_then_differences():
    # Differences 5, 1, -6, 300 fold to 10, 2, 11, 600: three of one byte and one of two.
    ids = np.array([5, 6, 0, 300], np.int32)
    stored = bytes(byte_view(DeltasCodec(1000).encode(ids, 0)))
    assert stored == bytes([0b01_00_00_00]) + b"\x0a\x02\x0b" + b"\x58\x02"


@pytest.mark.parametrize(
    "data",
    [
        b"\x01" + b"\x0a\x00",  # a difference in more bytes than it needs
        b"\x04" + b"\x0a",  # a length of an item that there is not
        b"\x00" + b"\x01",  # -1
        b"\x00" + b"\xc8",  # 100 of 100 ids
    ],
)
def test_deltas_bytes_that_no_ids_have_are_corruption(data):
    with pytest.raises(CorruptObjectError):
        DeltasCodec(100).decode(memoryview(data), INT32, (1,), 0)
