"""Noise that depends on seed, position and token id only, so that a request samples the same tokens in any
batch.

The noise is a hash, not a generator: every element can be computed alone, and one call serves the whole
batch.
"""

import numpy as np
import torch

_GOLDEN_32 = -1640531527
"""0x9E3779B9 as int32."""
_MIX_1 = -2048144789
"""0x85EBCA6B as int32, of MurmurHash3's finalizer."""
_MIX_2 = -1028477387
"""0xC2B2AE35 as int32, of MurmurHash3's finalizer."""


def row_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One 64-bit key for each (seed, position), by SplitMix64: `[rows]` uint64."""
    with np.errstate(over="ignore"):
        x = seeds.astype(np.uint64) * np.uint64(0xD1342543DE82EF95) + positions.astype(np.uint64)
        x += np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def negative_exponential(keys: np.ndarray, token_ids: torch.Tensor) -> torch.Tensor:
    """Minus standard exponential noise `[rows, k]` float32 for `token_ids`, `[rows, k]` or `[1, k]` int32.

    Where `p` are probabilities, `(p / noise).argmin(-1)` is a sample from them: of independent exponential
    times with rates `p`, each is the first with its own probability (the Gumbel trick, before its
    logarithms).
    """
    halves = torch.from_numpy(keys.view(np.int32).reshape(-1, 2)).to(token_ids.device)
    # torch shifts int32 arithmetically. The copies of the sign cost one bit of the hash.
    x = (token_ids * _GOLDEN_32) ^ halves[:, :1]
    x.bitwise_xor_(x >> 16).mul_(_MIX_1).add_(halves[:, 1:])
    x.bitwise_xor_(x >> 13).mul_(_MIX_2)
    # 31 bits and a half, never 0: an exponential of 0 would win whatever its rate. 1 gives an infinite one,
    # which never wins.
    uniform = (x & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(-(2.0**-31))
    return uniform.log1p_()
