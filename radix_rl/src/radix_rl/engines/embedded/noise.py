"""Gumbel noise that depends on seed, position and token id only, so that a request samples the same tokens in
any batch.

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


def gumbel(keys: np.ndarray, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise `[rows, k]` float32 for `token_ids`, `[rows, k]` or `[1, k]` int32."""
    halves = torch.from_numpy(keys.view(np.int32).reshape(-1, 2)).to(token_ids.device)
    x = (token_ids * _GOLDEN_32) ^ halves[:, :1]
    _xor_shift(x, 16)
    x.mul_(_MIX_1)
    _xor_shift(x, 13)
    x.add_(halves[:, 1:])
    x.mul_(_MIX_2)
    _xor_shift(x, 16)
    x.mul_(_MIX_1)
    _xor_shift(x, 15)
    # 23 bits and a half: never 0 and never 1, both of which would give an infinity.
    uniform = (x & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _xor_shift(x: torch.Tensor, bits: int) -> None:
    # torch shifts int32 arithmetically; the mask makes it a logical shift.
    x.bitwise_xor_((x >> bits) & ((1 << (32 - bits)) - 1))
