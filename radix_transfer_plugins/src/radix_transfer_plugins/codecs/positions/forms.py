"""How one set of key positions is stored, in a number of bytes that its row's position alone decides.

Shapes: n sets of K places each, all of rows whose payloads have one length; B bytes a payload.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

BLOCK_POSITIONS = 255
"""Positions a block of `BlockForm`: the most whose count fits a byte."""
_ABSENT = 0xFFFFFFFF
_NO_LOW_PART = 255


class SetForm(ABC):
    """A way to store a set: `pack` and `unpack` work on sets whose payloads have one length."""

    period: ClassVar[int]
    """Positions [i * period, (i + 1) * period) have payloads of one length."""

    @abstractmethod
    def payload_bytes_of(self, positions: np.ndarray, width: int) -> np.ndarray:
        """Bytes of one set's payload in the rows of `positions` `[n]` int64, `[n]`."""

    @abstractmethod
    def payload_bytes_below(self, position: int, width: int) -> int:
        """Sum of the payloads of one set a row over positions [0, position), in constant time."""

    @abstractmethod
    def scratch_items(self, position: int, width: int) -> int:
        """Items of temporary memory that one set takes, at most."""

    @abstractmethod
    def pack(self, sets: np.ndarray, last_position: int) -> tuple[np.ndarray, bool]:
        """Encode `sets` `[n, K]` of positions in [-1, last_position], in any order.

        Returns their payloads `[n, B]` uint8, and whether any set holds a position twice.
        """

    @abstractmethod
    def unpack(self, stored: np.ndarray, out: np.ndarray, positions: np.ndarray) -> bool:
        """Decode `stored` `[n, B]` uint8 into `out` `[n, K]`, ascending with the -1 at the end.

        Returns whether every set is one that the row of its position in `positions` `[n]` can hold.
        """


class BitForm(SetForm):
    """One bit for each position up to the row's, in whole words of 64, least significant bit first."""

    period: ClassVar[int] = 64

    def payload_bytes_of(self, positions: np.ndarray, width: int) -> np.ndarray:
        return 8 * (positions // 64 + 1)

    def payload_bytes_below(self, position: int, width: int) -> int:
        words, rest = divmod(position, 64)
        return 8 * (64 * words * (words + 1) // 2 + rest * (words + 1))

    def scratch_items(self, position: int, width: int) -> int:
        return max(width, 64 * (position // 64 + 1))

    def pack(self, sets: np.ndarray, last_position: int) -> tuple[np.ndarray, bool]:
        num_sets = len(sets)
        num_bits = 64 * (last_position // 64 + 1)
        # -1 of a set falls on the last column of the set before, which no position uses.
        stride = num_bits + 8
        mask = np.zeros(num_sets * stride, bool)
        mask[(sets + (np.arange(num_sets) * stride)[:, None]).reshape(-1)] = True
        mask = mask.reshape(num_sets, stride)
        mask[:, num_bits:] = False
        has_duplicates = np.count_nonzero(mask) != np.count_nonzero(sets >= 0)
        return np.packbits(mask[:, :num_bits], axis=1, bitorder="little"), has_duplicates

    def unpack(self, stored: np.ndarray, out: np.ndarray, positions: np.ndarray) -> bool:
        num_sets, num_bits = len(out), 8 * stored.shape[1]
        found = np.flatnonzero(np.unpackbits(stored, axis=1, bitorder="little").view(bool))
        set_starts = np.arange(num_sets) * num_bits
        ends = np.searchsorted(found, set_starts + num_bits)
        counts = np.diff(ends, prepend=0)
        if counts.max(initial=0) > out.shape[1]:
            return False
        largest = np.full(num_sets, -1)
        if len(found):
            largest = np.where(counts > 0, found[ends - 1] - set_starts, -1)
        if (largest > positions).any():
            return False
        _spread(found - np.repeat(set_starts, counts), counts, out)
        return True


class BlockForm(SetForm):
    """For each block of 255 positions a byte that counts its members, then a byte for each member.

    The members of all blocks follow each other, ascending; each byte is the member's place in its block. The
    rest of the K bytes is 255, which is no place.
    """

    period: ClassVar[int] = BLOCK_POSITIONS

    def payload_bytes_of(self, positions: np.ndarray, width: int) -> np.ndarray:
        return width + positions // BLOCK_POSITIONS + 1

    def payload_bytes_below(self, position: int, width: int) -> int:
        blocks, rest = divmod(position, BLOCK_POSITIONS)
        return position * width + BLOCK_POSITIONS * blocks * (blocks + 1) // 2 + rest * (blocks + 1)

    def scratch_items(self, position: int, width: int) -> int:
        return width + position // BLOCK_POSITIONS + 1

    def pack(self, sets: np.ndarray, last_position: int) -> tuple[np.ndarray, bool]:
        num_sets, width = sets.shape
        num_blocks = last_position // BLOCK_POSITIONS + 1
        members = _ascending(sets)
        payload = np.empty((num_sets, num_blocks + width), np.uint8)
        blocks = members // np.uint32(BLOCK_POSITIONS)
        np.subtract(
            members, blocks * np.uint32(BLOCK_POSITIONS), out=payload[:, num_blocks:], casting="unsafe"
        )
        # Places that hold no member are counted in a block after the last.
        np.minimum(blocks, np.uint32(num_blocks), out=blocks)
        rows = np.arange(num_sets)[:, None] * (num_blocks + 1)
        counts = np.bincount((blocks + rows).reshape(-1), minlength=num_sets * (num_blocks + 1))
        counts = counts.reshape(num_sets, num_blocks + 1)
        has_duplicates = _has_duplicates(members)
        if has_duplicates:
            return payload, True
        payload[:, :num_blocks] = counts[:, :num_blocks]
        if counts[:, num_blocks].any():
            payload[:, num_blocks:][members == _ABSENT] = _NO_LOW_PART
        return payload, False

    def unpack(self, stored: np.ndarray, out: np.ndarray, positions: np.ndarray) -> bool:
        num_sets, width = out.shape
        num_blocks = stored.shape[1] - width
        counts, places = stored[:, :num_blocks], stored[:, num_blocks:]
        lengths = counts.sum(axis=1, dtype=np.int64)
        if lengths.max(initial=0) > width:
            return False
        block_starts = np.arange(num_blocks, dtype=out.dtype) * BLOCK_POSITIONS
        members = np.repeat(np.tile(block_starts, num_sets), counts.reshape(-1))
        if lengths.min(initial=width) == width:
            np.add(members.reshape(num_sets, width), places, out=out)
            is_place = places.max(initial=0) < _NO_LOW_PART
            return bool(is_place and (out[:, 1:] > out[:, :-1]).all() and (out[:, -1] <= positions).all())
        held = np.arange(width) < lengths[:, None]
        low = places[held]
        if (low == _NO_LOW_PART).any() or (places[~held] != _NO_LOW_PART).any():
            return False
        out[...] = -1
        out[held] = members + low
        ascending = (out[:, 1:] > out[:, :-1]) | ~held[:, 1:]
        return bool(ascending.all() and (out.max(axis=1) <= positions).all())


class ListForm(SetForm):
    """The positions as K ascending little-endian uint32, padded with 2^32 - 1."""

    period: ClassVar[int] = 1 << 31

    def payload_bytes_of(self, positions: np.ndarray, width: int) -> np.ndarray:
        return np.full(len(positions), 4 * width)

    def payload_bytes_below(self, position: int, width: int) -> int:
        return 4 * width * position

    def scratch_items(self, position: int, width: int) -> int:
        return width

    def pack(self, sets: np.ndarray, last_position: int) -> tuple[np.ndarray, bool]:
        members = _ascending(sets)
        return members.view(np.uint8), _has_duplicates(members)

    def unpack(self, stored: np.ndarray, out: np.ndarray, positions: np.ndarray) -> bool:
        values = stored.view("<u4")
        absent = values == _ABSENT
        ascending = (values[:, 1:] > values[:, :-1]) | absent[:, 1:]
        np.copyto(out, values, casting="unsafe")
        out[absent] = -1
        return bool(ascending.all() and ((values <= positions[:, None]) | absent).all())


def _ascending(sets: np.ndarray) -> np.ndarray:
    """`sets` `[n, K]` as uint32, ascending; -1 becomes 2^32 - 1 and comes last."""
    return np.sort(sets.astype("<u4"), axis=1)


def _has_duplicates(members: np.ndarray) -> bool:
    """Whether a row of `_ascending` holds a position twice."""
    equal = members[:, 1:] == members[:, :-1]
    return bool(equal.any() and (equal & (members[:, 1:] != _ABSENT)).any())


def _spread(members: np.ndarray, counts: np.ndarray, out: np.ndarray) -> None:
    """Put `members` `[sum of counts]` into the rows of `out` `[n, K]`: `counts[i]` into row i, then -1."""
    width = out.shape[1]
    if counts.min(initial=width) == width:
        np.copyto(out, members.reshape(len(out), width), casting="unsafe")
        return
    out[...] = -1
    out[np.arange(width) < counts[:, None]] = members
