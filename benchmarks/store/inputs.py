"""The arrays that the store's benchmarks use."""

import numpy as np

NUM_EXPERTS = 128


def routed_experts(
    rows: int = 3071, *, num_experts: int = NUM_EXPERTS, layers: int = 48, dense: int = 0
) -> np.ndarray:
    """`[rows, layers, 8]` int32: by default 2048 prompt and 1024 output tokens of a 128-expert, top-8 model.

    The first `dense` layers never route.
    """
    ids = np.random.default_rng(0).integers(0, num_experts, (rows, layers, 8), np.int32)
    ids[:, :dense] = -1
    return ids


def indexer_topk(rows: int = 3071, layers: int = 8, top_k: int = 2048, *, first_row: int = 0) -> np.ndarray:
    """`[rows, layers, top_k]` int32, causal: position p holds 0..p while they fit, then some of them."""
    rng = np.random.default_rng(0)
    positions = np.full((rows, layers, top_k), -1, np.int32)
    for row in range(rows):
        position = first_row + row
        for layer in range(layers):
            if position < top_k:
                positions[row, layer, : position + 1] = np.arange(position + 1)
            else:
                positions[row, layer] = rng.choice(position + 1, top_k, replace=False)
    return positions


def mask_token_ids(vocabulary: int, support: int, items: int = 400_000) -> np.ndarray:
    """`[items]` int32: the ids of sampling masks of `support` ids each, ascending within a mask."""
    rng = np.random.default_rng(0)
    masks = [np.sort(rng.choice(vocabulary, support, replace=False)) for _ in range(items // support)]
    return np.concatenate(masks).astype(np.int32)
