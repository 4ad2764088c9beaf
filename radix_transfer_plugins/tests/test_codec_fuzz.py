"""Damaged payloads: an array of the shape that was asked for or a typed error, in bounded memory."""

import contextlib
import random
import tracemalloc

import numpy as np
import pytest

from radix_transfer_plugins.buffers import byte_view
from radix_transfer_plugins.codecs.deltas import DeltasCodec
from radix_transfer_plugins.codecs.experts import ExpertsCodec
from radix_transfer_plugins.codecs.narrow import NarrowCodec
from radix_transfer_plugins.codecs.positions import PositionBlocksCodec, PositionsCodec
from radix_transfer_plugins.codecs.raw import RawCodec
from radix_transfer_plugins.errors import CorruptObjectError

PAYLOADS = 10_000


def sets_of_positions(start_row):
    rng = np.random.default_rng(0)
    rows = [rng.choice(start_row + row + 1, (2, 16), replace=False) for row in range(4)]
    sets = np.array(rows, np.int32)
    sets[1, 1, 5:] = -1
    return sets


def experts_with_gaps():
    ids = np.random.default_rng(0).integers(0, 200, (9, 3, 2)).astype(np.int32)
    ids[:, 0] = -1
    ids[4] = -1
    ids[6, 1, 1] = -1
    return ids


CASES = {
    "raw": (RawCodec(), np.array([True, False] * 20), 0),
    "narrow": (NarrowCodec(300), np.arange(-1, 47, dtype=np.int32).reshape(6, 8), 3),
    "experts": (ExpertsCodec(200, 3, frozenset({0})), experts_with_gaps(), 0),
    "positions, bits": (PositionsCodec(), sets_of_positions(200), 200),
    "positions, lists": (PositionsCodec(), sets_of_positions(3000), 3000),
    "position_blocks, blocks": (PositionBlocksCodec(), sets_of_positions(3000), 3000),
    "position_blocks, lists": (PositionBlocksCodec(), sets_of_positions(20_000), 20_000),
    "deltas": (DeltasCodec(50_000), np.random.default_rng(0).integers(0, 50_000, 60).astype(np.int32), 0),
}


def damaged(payload, rng):
    data = bytearray(payload)
    for _ in range(rng.choice((1, 1, 2, 8))):
        kind = rng.randrange(4)
        place = rng.randrange(len(data) + 1)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1 and place < len(data):
            data[place] = rng.choice((0, 1, 127, 128, 254, 255))
        elif kind == 2:
            del data[place : place + rng.choice((1, 8))]
        else:
            data[place:place] = rng.randbytes(rng.choice((1, 8)))
    return memoryview(bytes(data))


@pytest.mark.parametrize("case", CASES)
def test_damaged_payloads_give_an_array_or_a_typed_error(case):
    codec, array, start_row = CASES[case]
    payload = bytes(byte_view(codec.encode(array, start_row)))
    rng = random.Random(0)
    refused = 0
    for _ in range(PAYLOADS):
        try:
            decoded = codec.decode(damaged(payload, rng), array.dtype, array.shape, start_row)
        except CorruptObjectError:
            refused += 1
        else:
            assert decoded.shape == array.shape
            assert decoded.dtype == array.dtype
    assert refused > PAYLOADS / 4


@pytest.mark.parametrize("case", CASES)
def test_damaged_payloads_take_no_memory_beyond_what_the_reference_admits_to(case):
    codec, array, start_row = CASES[case]
    payload = bytes(byte_view(codec.encode(array, start_row)))
    rng = random.Random(1)
    tracemalloc.start()
    try:
        for _ in range(300):
            data = damaged(payload, rng)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with contextlib.suppress(CorruptObjectError):
                codec.decode(data, array.dtype, array.shape, start_row)
            _, peak = tracemalloc.get_traced_memory()
            # Bit sets are spread out to a byte for each position of their rows.
            admitted = array.nbytes + 2 * array.shape[0] * (start_row + array.shape[0] + 64)
            assert peak - before < 64 * 1024 + 8 * admitted
    finally:
        tracemalloc.stop()
