"""`deltas`: ids that mostly ascend, as differences in the bytes each needs."""

import math
from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np

from radix_transfer_plugins.codecs.base import Buffer, Codec
from radix_transfer_plugins.errors import CodecError, ConfigError, CorruptObjectError, RefError

MAX_IDS = 1 << 30
_BLOCK_ITEMS = 1 << 16
"""Items worked on at a time, so that temporary memory stays below about 2 MiB; a multiple of 4."""
_COLUMNS = np.arange(4, dtype=np.uint8)


class DeltasCodec(Codec):
    """Integer arrays of ids in [0, ids), such as the vocabulary ids of sampling masks. Ordered.

    An item is stored as its difference d to the item before it in row-major order (the first: to 0), folded
    to u = 2 * d for d >= 0 and -2 * d - 1 for d < 0. Stored one after the other:

    1. For each item two bits, the number of bytes that u needs less one, four items a byte, least significant
       bits first, padded with 0.
    2. The bytes of each u, little-endian.

    Ids that ascend within a row of a mask cost one or two bytes each, any others at most four.
    """

    name: ClassVar[str] = "deltas"
    ordered: ClassVar[bool] = True
    row_addressable: ClassVar[bool] = False

    def __init__(self, ids: int) -> None:
        if not isinstance(ids, int) or isinstance(ids, bool) or not 1 <= ids <= MAX_IDS:
            raise ConfigError(
                f"codec 'deltas': expected ids in [1, {MAX_IDS}], got {ids!r}; use codec 'raw' for larger "
                "ranges"
            )
        self.ids = ids
        self._max_item_bytes = max(1, (2 * (ids - 1)).bit_length() + 7 >> 3)

    @classmethod
    def from_config(cls, config: Mapping[str, str | int | bool]) -> Self:
        if set(config) != {"ids"}:
            raise ConfigError(
                f"codec 'deltas': expected the configuration {{'ids': N}}, got {dict(config)!r}"
            )
        return cls(config["ids"])  # type: ignore[arg-type]  # checked by the constructor

    def get_config(self) -> dict[str, str | int | bool]:
        return {"ids": self.ids}

    def encode(self, array: np.ndarray, start_row: int) -> Buffer:
        if not self._holds_ids(array.dtype):
            raise CodecError(
                f"codec 'deltas' with {self.ids} ids stores integer arrays that can hold them, got dtype "
                f"{array.dtype!s}"
            )
        items = np.ascontiguousarray(array).reshape(-1)
        if items.size and (int(items.min()) < 0 or int(items.max()) >= self.ids):
            raise CodecError(
                f"codec 'deltas' stores ids in [0, {self.ids}), got values from {items.min()} to "
                f"{items.max()}; configure it with the model's number of ids"
            )
        lengths: list[np.ndarray] = []
        payloads: list[np.ndarray] = []
        for start in range(0, items.size, _BLOCK_ITEMS):
            block = items[start : start + _BLOCK_ITEMS].astype(np.int32)
            before = int(items[start - 1]) if start else 0
            differences = np.diff(block, prepend=np.int32(before))
            folded = ((differences << 1) ^ (differences >> 31)).astype("<u4")
            extra = (folded > 0xFF).astype(np.uint8) + (folded > 0xFFFF) + (folded > 0xFFFFFF)
            lengths.append(_pack_pairs(extra))
            payloads.append(folded.view(np.uint8).reshape(-1, 4)[extra[:, None] >= _COLUMNS])
        return np.concatenate([*lengths, *payloads]) if lengths else b""

    def decode(
        self,
        data: memoryview,
        dtype: np.dtype,
        shape: tuple[int, ...],
        start_row: int,
        rows: tuple[int, int] | None = None,
    ) -> np.ndarray:
        num_items = math.prod(shape)
        length_bytes = (num_items + 3) // 4
        if len(data) < length_bytes:
            raise CorruptObjectError(
                f"codec 'deltas' needs {length_bytes} bytes of lengths for {num_items} items, got "
                f"{len(data)} bytes in all"
            )
        stored = np.frombuffer(data, np.uint8)
        out = np.empty(num_items, dtype)
        offset, before = length_bytes, 0
        for start in range(0, num_items, _BLOCK_ITEMS):
            count = min(_BLOCK_ITEMS, num_items - start)
            pairs = stored[start // 4 : (start + count + 3) // 4]
            extra = _unpack_pairs(pairs)
            if extra[count:].any():
                raise CorruptObjectError("codec 'deltas' found lengths of items that there are not")
            extra = extra[:count]
            end = offset + count + int(extra.sum(dtype=np.int64))
            if end > len(stored):
                raise CorruptObjectError(
                    f"codec 'deltas' needs {end} bytes or more for {num_items} items, got {len(stored)}"
                )
            ids = self._ids(stored[offset:end], extra, before)
            out[start : start + count] = ids
            offset, before = end, int(ids[-1])
        if offset != len(stored):
            raise CorruptObjectError(
                f"codec 'deltas' found {len(stored)} bytes where {num_items} items take {offset}"
            )
        out = out.reshape(shape)
        return out if rows is None else out[rows[0] : rows[1]]

    def _ids(self, payload: np.ndarray, extra: np.ndarray, before: int) -> np.ndarray:
        """Ids `[n]` int64 of a block; `extra` `[n]` uint8 is the number of bytes of each less one."""
        spread = np.zeros((len(extra), 4), np.uint8)
        spread[extra[:, None] >= _COLUMNS] = payload
        folded = spread.view("<u4").reshape(-1).astype(np.int64)
        ids = np.cumsum((folded >> 1) ^ -(folded & 1)) + before
        # One form for each array: no difference in more bytes than it needs.
        if (folded < _LEAST_FOLDED[extra]).any() or int(ids.min()) < 0 or int(ids.max()) >= self.ids:
            raise CorruptObjectError(f"codec 'deltas' found a value that is no id in [0, {self.ids})")
        return ids

    def check(self, dtype: np.dtype, shape: tuple[int, ...], stored_bytes: int, start_row: int = 0) -> None:
        if not self._holds_ids(dtype):
            raise RefError(
                f"codec 'deltas' with {self.ids} ids returns integer arrays that can hold them, got {dtype!s}"
            )
        num_items = math.prod(shape)
        least = (num_items + 3) // 4 + num_items
        most = least + num_items * (self._max_item_bytes - 1)
        if not least <= stored_bytes <= most:
            raise RefError(
                f"codec 'deltas' stores shape {list(shape)} in {least} to {most} bytes, got stored_bytes "
                f"{stored_bytes}"
            )

    def _holds_ids(self, dtype: np.dtype) -> bool:
        return dtype.kind in "iu" and 1 << (8 * dtype.itemsize - (dtype.kind == "i")) >= self.ids


_LEAST_FOLDED = np.array([0, 1 << 8, 1 << 16, 1 << 24], np.int64)
"""The least u that needs so many bytes, by that number less one."""


def _pack_pairs(values: np.ndarray) -> np.ndarray:
    """`values` `[n]` uint8 below 4 as two bits each, `[ceil(n / 4)]` uint8."""
    padded = np.zeros(-(-len(values) // 4) * 4, np.uint8)
    padded[: len(values)] = values
    quads = padded.reshape(-1, 4)
    return quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6


def _unpack_pairs(packed: np.ndarray) -> np.ndarray:
    """The values of `_pack_pairs`, with those of the padding, `[4 * bytes]` uint8."""
    return (packed[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1)
