"""The positions codec on causal indexer rows: stored bytes, and time against copying the array."""

import numpy as np

from benchmarks.result import Result, at_most, shown
from benchmarks.store.inputs import indexer_topk
from benchmarks.timing import alternate
from radix_transfer_plugins.buffers import byte_view
from radix_transfer_plugins.codecs.positions import PositionsCodec


def run() -> list[Result]:
    rows = indexer_topk()
    codec = PositionsCodec()
    stored = byte_view(codec.encode(rows, 0))
    back = codec.decode(stored, rows.dtype, rows.shape, 0)
    ascending = np.sort(np.where(rows < 0, np.iinfo(np.int32).max, rows), axis=-1)
    assert np.array_equal(np.where(back < 0, np.iinfo(np.int32).max, back), ascending)
    seconds = alternate(
        {
            "copy": rows.copy,
            "encode": lambda: codec.encode(rows, 0),
            "decode": lambda: codec.decode(stored, rows.dtype, rows.shape, 0),
        },
        repetitions=5,
    )
    return [
        at_most("indexer top-k: stored bytes of int32", len(stored) / rows.nbytes, "ratio", 0.06),
        shown("indexer top-k: CPU, ndarray.copy", 1e3 * seconds["copy"], "ms"),
        at_most("indexer top-k: encode / ndarray.copy", seconds["encode"] / seconds["copy"], "ratio", 25),
        at_most("indexer top-k: decode / ndarray.copy", seconds["decode"] / seconds["copy"], "ratio", 25),
    ]
