"""The arrays that the store's benchmarks use."""

import numpy as np

NUM_EXPERTS = 128


def routed_experts(rows: int = 3071) -> np.ndarray:
    """`[rows, 48, 8]` int32: 2048 prompt and 1024 output tokens of a 48-layer, 128-expert, top-8 model."""
    return np.random.default_rng(0).integers(0, NUM_EXPERTS, (rows, 48, 8), np.int32)


def indexer_topk(rows: int = 3071, layers: int = 8, top_k: int = 2048) -> np.ndarray:
    """`[rows, layers, top_k]` int32, causal: row i holds all of 0..i while they fit, then a choice of
    them.
    """
    rng = np.random.default_rng(0)
    positions = np.full((rows, layers, top_k), -1, np.int32)
    for row in range(rows):
        for layer in range(layers):
            if row < top_k:
                positions[row, layer, : row + 1] = np.arange(row + 1)
            else:
                positions[row, layer] = rng.choice(row + 1, top_k, replace=False)
    return positions
