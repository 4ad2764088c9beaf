"""`positions` and `position_blocks`: sets of key positions; a whole causal prefix costs one bit.

Notation: R rows, S sets a row (the product of the middle axes), K positions a set at most; row i has the
absolute position p = start_row + i and its sets are subsets of [0, p]. Stored one after the other:

1. R * S flags, row-major, least significant bit first, padded to a whole byte: 1 where the set is all of
   [0, p].
2. For each set whose flag is 0, in order, a payload in the form that p and K decide (see `forms`).

Four rows of one set each, K = 3. The first three sets are all of their prefix, the last one is {1, 3}: a byte
of flags, then one word of 64 bits with the bits 1 and 3.

>>> sets = np.array([[[0, -1, -1]], [[1, 0, -1]], [[0, 1, 2]], [[3, 1, -1]]], np.int32)
>>> bytes(PositionsCodec().encode(sets, start_row=0)).hex(" ")
'07 0a 00 00 00 00 00 00 00'

The codecs differ in the forms that they use. `position_blocks` is smaller from position K * 8 on, by half
and more where contexts are long; `positions` is what readers of version 0.1 know.
"""

import math
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import numpy as np

from radix_transfer_plugins.codecs.base import Buffer, Codec
from radix_transfer_plugins.codecs.positions.forms import (
    BLOCK_POSITIONS,
    BitForm,
    BlockForm,
    ListForm,
    SetForm,
)
from radix_transfer_plugins.errors import CodecError, CorruptObjectError, RefError
from radix_transfer_plugins.huge_pages import new_array

MAX_POSITION = 2**31 - 1
_SCRATCH_ITEMS = 1 << 21
"""Items worked on at a time, so that scratch memory stays below about 32 MiB whatever the array's size."""


class Stretch(NamedTuple):
    """Rows of positions [start, end) store their sets in `form`."""

    form: SetForm
    start: int
    end: int


class PositionsCodec(Codec):
    """int32 or int64 arrays `[rows, ..., K]` of causal key positions, -1 where fewer exist.

    A set along the last axis: decoded ascending with the -1 at the end, wherever they were. Stored as bits up
    to position K * 32, and as lists from there on.
    """

    name: ClassVar[str] = "positions"
    ordered: ClassVar[bool] = False
    row_addressable: ClassVar[bool] = True

    @staticmethod
    def stretches(width: int) -> tuple[Stretch, ...]:
        """Which form the sets of K = `width` places have, by position."""
        bits_end = 64 * (4 * width // 8)
        return (Stretch(BitForm(), 0, bits_end), Stretch(ListForm(), bits_end, MAX_POSITION + 1))

    def encode(self, array: np.ndarray, start_row: int) -> Buffer:
        if _unsupported(array.dtype, array.shape):
            raise CodecError(
                f"codec {self.name!r} stores int32 or int64 arrays [rows, ..., K], got {array.dtype!s} "
                f"{array.shape}"
            )
        num_rows, num_sets, width = _row_set_width(array.shape)
        if num_sets == 0:
            return b""
        if start_row + num_rows - 1 > MAX_POSITION:
            raise CodecError(
                f"codec {self.name!r} stores positions up to {MAX_POSITION}, got row "
                f"{start_row + num_rows - 1}"
            )
        sets = array.reshape(num_rows, num_sets, width)
        complete = np.zeros((num_rows, num_sets), bool)
        payloads: list[np.ndarray] = []
        for form, first, last in self._batches(start_row, 0, num_rows, num_sets, width):
            block = np.ascontiguousarray(sets[first:last])
            _mark_ascending_prefixes(block, start_row + first, complete[first:last])
            rest = ~complete[first:last]
            if not rest.any():
                continue
            positions = start_row + first + np.nonzero(rest)[0]
            chosen = block.reshape(len(positions), width) if rest.all() else block[rest]
            payload, full = self._pack(form, chosen, positions)
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
        complete, offsets = self._index(data, num_rows, num_sets, width, start_row)
        payload = np.frombuffer(data, np.uint8)
        out = new_array((last_row - first_row, num_sets, width), dtype)
        for form, first, last in self._batches(start_row, first_row, last_row, num_sets, width):
            target = out[first - first_row : last - first_row]
            flags = complete[first:last]
            if flags.any():
                _fill_complete(target, flags, start_row + first)
            if not flags.all():
                self._unpack(form, payload[offsets[first] : offsets[last]], target, ~flags, start_row + first)
        return out.reshape(last_row - first_row, *shape[1:])

    def check(self, dtype: np.dtype, shape: tuple[int, ...], stored_bytes: int, start_row: int = 0) -> None:
        if _unsupported(dtype, shape):
            raise RefError(
                f"codec {self.name!r} returns int32 or int64 arrays [rows, ..., K], got {dtype!s} with "
                f"shape {list(shape)}"
            )
        num_rows, num_sets, width = _row_set_width(shape)
        end_row = start_row + num_rows
        if end_row - 1 > MAX_POSITION:
            raise RefError(
                f"codec {self.name!r} stores positions up to {MAX_POSITION}, got rows up to {end_row - 1}"
            )
        flag_bytes = (num_rows * num_sets + 7) // 8
        # Rows below position K may hold their whole prefix; the others cannot.
        first_incomplete = max(start_row, min(width, end_row))
        least = flag_bytes + num_sets * self._payload_bytes_between(first_incomplete, end_row, width)
        most = flag_bytes + num_sets * self._payload_bytes_between(start_row, end_row, width)
        if not least <= stored_bytes <= most:
            raise RefError(
                f"codec {self.name!r} stores shape {list(shape)} from row {start_row} in {least} to {most} "
                f"bytes, got stored_bytes {stored_bytes}"
            )

    def _payload_bytes_between(self, start: int, end: int, width: int) -> int:
        """Sum of the payloads of one set a row over positions [start, end), in constant time."""
        total = 0
        for form, first, last in self.stretches(width):
            first, last = max(first, start), min(last, end)
            if first < last:
                total += form.payload_bytes_below(last, width) - form.payload_bytes_below(first, width)
        return total

    def _batches(
        self, start_row: int, first: int, last: int, num_sets: int, width: int
    ) -> Iterator[tuple[SetForm, int, int]]:
        """Row ranges that share one form and payload length, and need bounded scratch memory."""
        for form, start, end in self.stretches(width):
            stretch_last = min(last, end - start_row)
            while first < stretch_last and start_row + first >= start:
                position = start_row + first
                items_per_row = max(1, num_sets * form.scratch_items(position, width))
                step = max(1, _SCRATCH_ITEMS // items_per_row)
                batch_end = min(stretch_last, first + step, first + form.period - position % form.period)
                yield form, first, batch_end
                first = batch_end

    def _pack(self, form: SetForm, sets: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Encode `sets` `[n, K]` of one payload length.

        Returns their payloads `[n, bytes]` uint8, and which of them are complete, `[n]` bool.
        """
        num_sets, width = sets.shape
        if width == 0:
            return np.empty((num_sets, 0), np.uint8), np.zeros(num_sets, bool)
        if sets.min() < -1 or (sets.max(axis=1) > positions).any():
            bad = np.argmax((sets.min(axis=1) < -1) | (sets.max(axis=1) > positions))
            raise CodecError(
                f"codec {self.name!r}: the row of position {positions[bad]} may hold positions from -1 to "
                f"{positions[bad]}, got values from {sets[bad].min()} to {sets[bad].max()}; is start_row "
                "right?"
            )
        payload, has_duplicates = form.pack(sets, int(positions[-1]))
        if has_duplicates:
            raise CodecError(
                f"codec {self.name!r} stores sets, got a row that holds a position twice; use codec 'raw'"
            )
        if positions[0] >= width:
            return payload, np.zeros(num_sets, bool)
        return payload, np.count_nonzero(sets >= 0, axis=1) == positions + 1

    def _index(
        self, data: memoryview, num_rows: int, num_sets: int, width: int, start_row: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Flags `[rows, sets]` bool, and for each row `[rows + 1]` the offset of its payloads in `data`."""
        num_flags = num_rows * num_sets
        flag_bytes = (num_flags + 7) // 8
        if len(data) < flag_bytes:
            raise CorruptObjectError(
                f"codec {self.name!r} needs {flag_bytes} bytes of flags, got {len(data)} bytes in all"
            )
        bits = np.unpackbits(np.frombuffer(data, np.uint8, flag_bytes), bitorder="little")
        complete = bits[:num_flags].view(bool).reshape(num_rows, num_sets)
        lengths = np.empty(num_rows, np.int64)
        for form, start, end in self.stretches(width):
            first = min(max(0, start - start_row), num_rows)
            last = min(max(first, end - start_row), num_rows)
            lengths[first:last] = form.payload_bytes_of(np.arange(start_row + first, start_row + last), width)
        offsets = np.full(num_rows + 1, flag_bytes)
        offsets[1:] += np.cumsum((num_sets - np.count_nonzero(complete, axis=1)) * lengths)
        if offsets[-1] != len(data) or bits[num_flags:].any() or complete[max(0, width - start_row) :].any():
            raise CorruptObjectError(
                f"codec {self.name!r} found flags that need {offsets[-1]} bytes for {num_rows} rows, got "
                f"{len(data)} bytes"
            )
        return complete, offsets

    def _unpack(
        self, form: SetForm, stored: np.ndarray, target: np.ndarray, wanted: np.ndarray, first_position: int
    ) -> None:
        """Decode payloads of one length.

        `stored` `[n * bytes]` uint8 goes into the sets of `target` `[rows, sets, K]` that `wanted` marks.
        """
        width = target.shape[2]
        if width == 0:
            return
        positions = first_position + np.nonzero(wanted)[0]
        if wanted.all():
            out = target.reshape(len(positions), width)
        else:
            out = np.empty((len(positions), width), target.dtype)
        if not form.unpack(stored.reshape(len(positions), -1), out, positions):
            raise CorruptObjectError(f"codec {self.name!r} found a set that its row cannot hold")
        if not wanted.all():
            target[wanted] = out


class PositionBlocksCodec(PositionsCodec):
    """As `positions`, in half of its bytes and less where contexts are long.

    Stored as bits up to position K * 8, from there on as counts and low parts by block, and as lists where
    those would be longer, from position K * 765 on.
    """

    name: ClassVar[str] = "position_blocks"

    @staticmethod
    def stretches(width: int) -> tuple[Stretch, ...]:
        bits_end = 64 * (width // 8)
        # A payload of K + blocks bytes is not longer than one of 4 * K while there are at most 3 * K blocks.
        blocks_end = min(BLOCK_POSITIONS * 3 * width, MAX_POSITION + 1)
        return (
            Stretch(BitForm(), 0, bits_end),
            Stretch(BlockForm(), bits_end, blocks_end),
            Stretch(ListForm(), blocks_end, MAX_POSITION + 1),
        )


def _unsupported(dtype: np.dtype, shape: tuple[int, ...]) -> bool:
    return dtype.kind != "i" or dtype.itemsize < 4 or len(shape) < 2


def _row_set_width(shape: tuple[int, ...]) -> tuple[int, int, int]:
    return shape[0], math.prod(shape[1:-1]), shape[-1]


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


def _fill_complete(target: np.ndarray, complete: np.ndarray, first_position: int) -> None:
    num_rows, _, width = target.shape
    template = _prefix_template(first_position, num_rows, width, target.dtype)
    if complete.all():
        target[...] = template[:, None, :]
    else:
        target[complete] = template[np.nonzero(complete)[0]]
