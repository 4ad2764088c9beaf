"""Every codec on the arrays it is made for: stored bytes, and time against copying the int32 array.

General compressors see the same arrays side by side, so that a reader sees why none of them is used: zstd on
the bytes as they are, and blosc2 with its bitshuffle filter.
"""

from collections.abc import Callable

import blosc2
import numpy as np
import zstandard

from benchmarks.result import Result, at_most, shown
from benchmarks.store.inputs import indexer_topk, mask_token_ids, routed_experts
from benchmarks.timing import alternate
from radix_transfer_plugins.buffers import byte_view
from radix_transfer_plugins.codecs.base import Codec
from radix_transfer_plugins.codecs.deltas import DeltasCodec
from radix_transfer_plugins.codecs.experts import ExpertsCodec
from radix_transfer_plugins.codecs.narrow import NarrowCodec
from radix_transfer_plugins.codecs.positions import PositionBlocksCodec

VOCABULARY = 151_936
REPETITIONS = 5


def run() -> list[Result]:
    blosc2.set_nthreads(1)
    dense = frozenset(range(3))
    results = _measure(
        "128 experts, 48 layers, top 8", NarrowCodec(128), routed_experts(), 0, (0.26, None, None)
    )
    results += _measure(
        "256 experts, 61 layers of which 3 dense, top 8",
        ExpertsCodec(256, 61, dense),
        routed_experts(num_experts=256, layers=61, dense=3),
        0,
        (0.26, 6, 4),
    )
    for first_row, num_rows, layers, bar in (
        (0, 3071, 8, 0.06),
        (32_768, 512, 8, 0.28),
        (131_072, 512, 8, 0.33),
    ):
        rows = indexer_topk(num_rows, layers, first_row=first_row)
        name = f"indexer top-k of rows {first_row} to {first_row + num_rows}"
        results += _measure(name, PositionBlocksCodec(), rows, first_row, (bar, 40, 25))
    for support in (20, 2000):
        results += _measure(
            f"sampling masks of {support} ids",
            DeltasCodec(VOCABULARY),
            mask_token_ids(VOCABULARY, support),
            0,
            (None, None, None),
        )
    return results


def _measure(
    name: str,
    codec: Codec,
    array: np.ndarray,
    start_row: int,
    bars: tuple[float | None, float | None, float | None],
) -> list[Result]:
    """`bars`: the most stored bytes of int32, and encoding and decoding of `ndarray.copy`."""
    stored = byte_view(codec.encode(array, start_row))
    back = codec.decode(stored, array.dtype, array.shape, start_row)
    assert np.array_equal(back, array if codec.ordered else _ascending(array))
    compressors = _compressors(array)
    compressed = {kind: compress() for kind, (compress, _) in compressors.items()}
    cases: dict[str, Callable[[], object]] = {
        "copy": array.copy,
        "encode": lambda: codec.encode(array, start_row),
        "decode": lambda: codec.decode(stored, array.dtype, array.shape, start_row),
    }
    for kind, (compress, decompress) in compressors.items():
        cases[f"{kind} encode"] = compress
        cases[f"{kind} decode"] = lambda decompress=decompress, data=compressed[kind]: decompress(data)
    seconds = alternate(cases, repetitions=REPETITIONS)
    label = f"{codec.name}, {name}"
    figures = (
        len(stored) / array.nbytes,
        *(seconds[case] / seconds["copy"] for case in ("encode", "decode")),
    )
    results = []
    for what, value, bar in zip(
        ("stored bytes of int32", "encode / ndarray.copy", "decode / ndarray.copy"),
        figures,
        bars,
        strict=True,
    ):
        result = shown(f"{label}: {what}", value, "ratio")
        results.append(result if bar is None else at_most(f"{label}: {what}", value, "ratio", bar))
    for kind, data in compressed.items():
        results.append(shown(f"{kind}, {name}: stored bytes of int32", len(data) / array.nbytes, "ratio"))
        for what in ("encode", "decode"):
            ratio = seconds[f"{kind} {what}"] / seconds["copy"]
            results.append(shown(f"{kind}, {name}: {what} / ndarray.copy", ratio, "ratio"))
    return results


def _compressors(
    array: np.ndarray,
) -> dict[str, tuple[Callable[[], bytes], Callable[[bytes], object]]]:
    """For each the functions that compress the array and decompress its bytes."""
    zstd, back = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    return {
        "zstd": (lambda: zstd.compress(array.data), back.decompress),
        "blosc2 bitshuffle": (
            lambda: bytes(
                blosc2.compress2(
                    array,
                    typesize=array.itemsize,
                    codec=blosc2.Codec.LZ4,
                    clevel=5,
                    filters=[blosc2.Filter.BITSHUFFLE],
                    nthreads=1,
                )
            ),
            lambda data: blosc2.decompress2(data, nthreads=1),
        ),
    }


def _ascending(sets: np.ndarray) -> np.ndarray:
    last = np.iinfo(sets.dtype).max
    ordered = np.sort(np.where(sets < 0, last, sets), axis=-1)
    return np.where(ordered == last, -1, ordered)
