"""`positions`: sets of key positions, one bit each, and nothing at all for a whole causal prefix.

Notation: R rows, S sets a row (the product of the middle axes), K positions a set at most; row i has the
absolute position p = start_row + i and its sets are subsets of [0, p]. Stored one after the other:

1. R * S flags, row-major, least significant bit first, padded to a whole byte: 1 where the set is all of [0,
p].
2. For each set whose flag is 0, in order: a bit set of [0, p] in 8 * ceil((p + 1) / 64) bytes, least
significant bit first;
   or, where that would take more than 4 * K bytes, the positions as K ascending little-endian uint32, padded
   with 2^32 - 1.

All sets of 64 consecutive positions have payloads of one length, which is what the loops below go by.
"""

import math
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from radix_transfer_plugins.codecs.base import Buffer, Codec
from radix_transfer_plugins.errors import CodecError, CorruptObjectError, RefError

MAX_POSITION = 2**31 - 1
_ABSENT = 0xFFFFFFFF
_SCRATCH_ITEMS = 1 << 21
"""Items worked on at a time, so that scratch memory stays below about 32 MiB whatever the array's size."""


class PositionsCodec(Codec):
    """int32 or int64 arrays `[rows, ..., K]` of causal key positions, -1 where fewer exist.

    A set along the last axis: decoded ascending with the -1 at the end, wherever they were.
    """

    name: ClassVar[str] = "positions"
    ordered: ClassVar[bool] = False
    row_addressable: ClassVar[bool] = True

    def encode(self, array: np.ndarray, start_row: int) -> Buffer:
        if _unsupported(array.dtype, array.shape):
            raise CodecError(
                f"codec 'positions' stores int32 or int64 arrays [rows, ..., K], got {array.dtype!s} "
                f"{array.shape}"
            )
        num_rows, num_sets, width = _row_set_width(array.shape)
        if num_sets == 0:
            return b""
        if start_row + num_rows - 1 > MAX_POSITION:
            raise CodecError(
                f"codec 'positions' stores positions up to {MAX_POSITION}, got row {start_row + num_rows - 1}"
            )
        sets = array.reshape(num_rows, num_sets, width)
        complete = np.zeros((num_rows, num_sets), bool)
        payloads: list[np.ndarray] = []
        for first, last in _blocks(start_row, 0, num_rows, num_sets, width):
            block = np.ascontiguousarray(sets[first:last])
            _mark_ascending_prefixes(block, start_row + first, complete[first:last])
            rest = ~complete[first:last]
            if rest.any():
                whole = rest.all()
                positions = start_row + first + np.nonzero(rest)[0]
                payload, full = _pack(
                    block.reshape(len(positions), width) if whole else block[rest], positions
                )
                if full.any():
                    complete[first:last][rest] = full
                    payload = payload[~full]
                payloads.append(payload.reshape(-1))
        return np.concatenate([np.packbits(complete.reshape(-1), bitorder="little"), *payloads])

    def decode(
        self,
        data: memoryview,
        dtype: np.dtype,
        shape: tuple[int, ...],
        start_row: int,
        rows: tuple[int, int] | None = None,
    ) -> np.ndarray:
        num_rows, num_sets, width = _row_set_width(shape)
        if num_sets == 0 and not data:
            # Without sets no bytes are stored, and nothing bounds the number of rows.
            return np.empty(shape if rows is None else (rows[1] - rows[0], *shape[1:]), dtype)
        first_row, last_row = (0, num_rows) if rows is None else rows
        complete, offsets = _index(data, num_rows, num_sets, width, start_row)
        payload = np.frombuffer(data, np.uint8)
        out = np.empty((last_row - first_row, num_sets, width), dtype)
        for first, last in _blocks(start_row, first_row, last_row, num_sets, width):
            target = out[first - first_row : last - first_row]
            flags = complete[first:last]
            if flags.any():
                _fill_complete(target, flags, start_row + first)
            if not flags.all():
                stored = payload[offsets[first] : offsets[last]]
                _unpack(stored, target, ~flags, start_row + first)
        return out.reshape(last_row - first_row, *shape[1:])

    def check(self, dtype: np.dtype, shape: tuple[int, ...], stored_bytes: int, start_row: int = 0) -> None:
        if _unsupported(dtype, shape):
            raise RefError(
                f"codec 'positions' returns int32 or int64 arrays [rows, ..., K], got {dtype!s} with "
                f"shape {list(shape)}"
            )
        num_rows, num_sets, width = _row_set_width(shape)
        end_row = start_row + num_rows
        if end_row - 1 > MAX_POSITION:
            raise RefError(
                f"codec 'positions' stores positions up to {MAX_POSITION}, got rows up to {end_row - 1}"
            )
        flag_bytes = (num_rows * num_sets + 7) // 8
        # Rows below position K may hold their whole prefix; the others cannot.
        least = flag_bytes + num_sets * _payload_bytes_between(
            max(start_row, min(width, end_row)), end_row, width
        )
        most = flag_bytes + num_sets * _payload_bytes_between(start_row, end_row, width)
        if not least <= stored_bytes <= most:
            raise RefError(
                f"codec 'positions' stores shape {list(shape)} from row {start_row} in {least} to {most} "
                "bytes, "
                f"got stored_bytes {stored_bytes}"
            )


def _unsupported(dtype: np.dtype, shape: tuple[int, ...]) -> bool:
    return dtype.kind != "i" or dtype.itemsize < 4 or len(shape) < 2


def _row_set_width(shape: tuple[int, ...]) -> tuple[int, int, int]:
    return shape[0], math.prod(shape[1:-1]), shape[-1]


def _payload_bytes(position: int, width: int) -> int:
    """Payload of one set of the row at this position, if it is not complete."""
    return min(8 * (position // 64 + 1), 4 * width)


def _payload_bytes_between(start: int, end: int, width: int) -> int:
    """Sum of `_payload_bytes` over positions [start, end), in constant time."""
    return _payload_bytes_below(end, width) - _payload_bytes_below(start, width)


def _payload_bytes_below(end: int, width: int) -> int:
    # Up to this position a bit set is not longer than the list.
    capped_from = min(end, 64 * (4 * width // 8))
    words, rest = divmod(capped_from, 64)
    return 8 * (64 * words * (words + 1) // 2 + rest * (words + 1)) + (end - capped_from) * 4 * width


def _blocks(start_row: int, first: int, last: int, num_sets: int, width: int) -> Iterator[tuple[int, int]]:
    """Row ranges that share one payload length and need bounded scratch memory."""
    while first < last:
        position = start_row + first
        items_per_row = max(1, num_sets * max(width, min(64 * (position // 64 + 1), 32 * width)))
        step = max(1, _SCRATCH_ITEMS // items_per_row)
        end = min(last, first + step, first + 64 - position % 64)
        yield first, end
        first = end


def _prefix_template(first_position: int, num_rows: int, width: int, dtype: np.dtype) -> np.ndarray:
    """`[num_rows, width]`: 0, 1, .. p and -1 after it."""
    columns = np.arange(width, dtype=dtype)
    positions = np.arange(first_position, first_position + num_rows)[:, None]
    return np.where(columns <= positions, columns, dtype.type(-1))


def _mark_ascending_prefixes(block: np.ndarray, first_position: int, complete: np.ndarray) -> None:
    """Mark the sets that are whole prefixes in ascending order, as engines write them.

    `_pack` finds the unordered ones.
    """
    num_rows, _, width = block.shape
    if first_position < width:
        template = _prefix_template(first_position, num_rows, width, block.dtype)
        possible = np.arange(first_position, first_position + num_rows) < width
        np.logical_and((block == template[:, None, :]).all(axis=2), possible[:, None], out=complete)


def _pack(sets: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encode `sets` `[n, K]` of one payload length.

    Returns their payloads `[n, bytes]` uint8, and which of them are complete, `[n]` bool.
    """
    num_sets, width = sets.shape
    if width == 0:
        return np.empty((num_sets, 0), np.uint8), np.zeros(num_sets, bool)
    if sets.min() < -1 or (sets.max(axis=1) > positions).any():
        bad = np.argmax((sets.min(axis=1) < -1) | (sets.max(axis=1) > positions))
        raise CodecError(
            f"codec 'positions': the row of position {positions[bad]} may hold positions from -1 to "
            f"{positions[bad]}, "
            f"got values from {sets[bad].min()} to {sets[bad].max()}; is start_row right?"
        )
    num_bits = 64 * (int(positions[0]) // 64 + 1)
    if num_bits // 8 > 4 * width:
        ordered = np.sort(sets.astype("<u4"), axis=1)
        has_duplicates = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != _ABSENT)).any()
        payload = ordered.view(np.uint8)
    else:
        # -1 of a set falls on the last column of the set before, which no position uses.
        stride = num_bits + 8
        mask = np.zeros(num_sets * stride, bool)
        mask[(sets + (np.arange(num_sets) * stride)[:, None]).reshape(-1)] = True
        mask = mask.reshape(num_sets, stride)
        mask[:, num_bits:] = False
        has_duplicates = np.count_nonzero(mask) != np.count_nonzero(sets >= 0)
        payload = np.packbits(mask[:, :num_bits], axis=1, bitorder="little")
    if has_duplicates:
        raise CodecError(
            "codec 'positions' stores sets, got a row that holds a position twice; use codec 'raw'"
        )
    if positions[0] >= width:
        return payload, np.zeros(num_sets, bool)
    return payload, np.count_nonzero(sets >= 0, axis=1) == positions + 1


def _index(
    data: memoryview, num_rows: int, num_sets: int, width: int, start_row: int
) -> tuple[np.ndarray, np.ndarray]:
    """Flags `[rows, sets]` bool, and for each row `[rows + 1]` the offset of its payloads in `data`."""
    num_flags = num_rows * num_sets
    flag_bytes = (num_flags + 7) // 8
    if len(data) < flag_bytes:
        raise CorruptObjectError(
            f"codec 'positions' needs {flag_bytes} bytes of flags, got {len(data)} bytes in all"
        )
    bits = np.unpackbits(np.frombuffer(data, np.uint8, flag_bytes), bitorder="little")
    complete = bits[:num_flags].view(bool).reshape(num_rows, num_sets)
    positions = np.arange(start_row, start_row + num_rows)
    lengths = np.minimum(8 * (positions // 64 + 1), 4 * width)
    offsets = np.full(num_rows + 1, flag_bytes)
    offsets[1:] += np.cumsum((num_sets - np.count_nonzero(complete, axis=1)) * lengths)
    if offsets[-1] != len(data) or bits[num_flags:].any() or complete[max(0, width - start_row) :].any():
        raise CorruptObjectError(
            f"codec 'positions' found flags that need {offsets[-1]} bytes for {num_rows} rows, got "
            f"{len(data)} bytes"
        )
    return complete, offsets


def _fill_complete(target: np.ndarray, complete: np.ndarray, first_position: int) -> None:
    num_rows, _, width = target.shape
    template = _prefix_template(first_position, num_rows, width, target.dtype)
    if complete.all():
        target[...] = template[:, None, :]
    else:
        target[complete] = template[np.nonzero(complete)[0]]


def _unpack(stored: np.ndarray, target: np.ndarray, wanted: np.ndarray, first_position: int) -> None:
    """Decode payloads of one length.

    `stored` `[n, bytes]` uint8 goes into the sets of `target` `[rows, sets, K]` that `wanted` marks.
    """
    width = target.shape[2]
    if width == 0:
        return
    positions = first_position + np.nonzero(wanted)[0]
    num_bits = 64 * (first_position // 64 + 1)
    whole = wanted.all()
    out = target.reshape(len(positions), width) if whole else np.empty((len(positions), width), target.dtype)
    stored = stored.reshape(len(positions), -1)
    if num_bits // 8 > 4 * width:
        valid = _unpack_lists(stored, out, positions)
    else:
        valid = _unpack_bits(stored, out, positions, num_bits)
    if not valid:
        raise CorruptObjectError("codec 'positions' found a set that its row cannot hold")
    if not whole:
        target[wanted] = out


def _unpack_lists(stored: np.ndarray, out: np.ndarray, positions: np.ndarray) -> bool:
    values = stored.view("<u4")
    ascending = (values[:, 1:] > values[:, :-1]) | (values[:, 1:] == _ABSENT)
    absent = values == _ABSENT
    np.copyto(out, values, casting="unsafe")
    out[absent] = -1
    return bool(ascending.all() and ((values <= positions[:, None]) | absent).all())


def _unpack_bits(stored: np.ndarray, out: np.ndarray, positions: np.ndarray, num_bits: int) -> bool:
    num_sets, width = out.shape
    found = np.flatnonzero(np.unpackbits(stored, axis=1, bitorder="little").view(bool))
    set_starts = np.arange(num_sets) * num_bits
    ends = np.searchsorted(found, set_starts + num_bits)
    counts = np.diff(ends, prepend=0)
    if counts.max(initial=0) > width:
        return False
    largest = np.where(counts > 0, found[ends - 1] - set_starts, -1) if len(found) else np.full(num_sets, -1)
    if (largest > positions).any():
        return False
    if counts.min(initial=width) == width:
        np.subtract(found.reshape(num_sets, width), set_starts[:, None], out=out, casting="unsafe")
    else:
        out[...] = -1
        out[np.arange(width) < counts[:, None]] = found - np.repeat(set_starts, counts)
    return True
