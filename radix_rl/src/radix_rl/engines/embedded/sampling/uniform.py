"""Random numbers of seed and position alone, so that a request samples the same tokens in any batch.

They come from a hash, not a generator: each can be computed alone, and one call serves the whole batch.
"""

import numpy as np


def row_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One 64-bit key for each (seed, position), by SplitMix64: uint64 of their common shape."""
    with np.errstate(over="ignore"):
        x = seeds.astype(np.uint64) * np.uint64(0xD1342543DE82EF95) + positions.astype(np.uint64)
        x += np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers between 0 and 1, float64 of their common shape, never 0 nor 1."""
    return ((row_keys(seeds, positions) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
