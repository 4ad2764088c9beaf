"""`narrow`: ids of a known range in one or two bytes each."""

import math
from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np

from radix_transfer_plugins.codecs.base import Buffer, Codec, narrowest_signed
from radix_transfer_plugins.errors import CodecError, ConfigError, CorruptObjectError, RefError
from radix_transfer_plugins.huge_pages import new_array

MAX_IDS = 65535
_BLOCK_ITEMS = 1 << 18
"""Items worked on at a time: they stay in the processor's cache from one pass to the next."""


class NarrowCodec(Codec):
    """Integer arrays of ids in [-1, ids). Ordered.

    Each item is stored as uint8 if `ids` <= 255 and as little-endian uint16 otherwise; -1 is stored as the
    largest code, which no id can have. The width follows from the model's declared number of ids, never from
    the values of one array.
    """

    name: ClassVar[str] = "narrow"
    ordered: ClassVar[bool] = True
    row_addressable: ClassVar[bool] = True

    def __init__(self, ids: int) -> None:
        if not isinstance(ids, int) or isinstance(ids, bool) or not 1 <= ids <= MAX_IDS:
            raise ConfigError(
                f"codec 'narrow': expected ids in [1, {MAX_IDS}], got {ids!r}; use codec 'raw' for larger "
                "ranges"
            )
        self.ids = ids
        self._code = np.dtype("u1") if ids <= 255 else np.dtype("<u2")
        self._signed_ids = 1 << (8 * self._code.itemsize - 1)

    @classmethod
    def from_config(cls, config: Mapping[str, str | int | bool]) -> Self:
        if set(config) != {"ids"}:
            raise ConfigError(
                f"codec 'narrow': expected the configuration {{'ids': N}}, got {dict(config)!r}"
            )
        return cls(config["ids"])  # type: ignore[arg-type]  # checked by the constructor

    def get_config(self) -> dict[str, str | int | bool]:
        return {"ids": self.ids}

    def narrowest(self, dtype: np.dtype) -> np.dtype:
        return narrowest_signed(self.ids, dtype)

    def row_bytes(self, dtype: np.dtype, shape: tuple[int, ...]) -> int | None:
        return math.prod(shape[1:]) * self._code.itemsize if shape else None

    def encode(self, array: np.ndarray, start_row: int) -> Buffer:
        if not self._holds_ids(array.dtype):
            raise CodecError(
                f"codec 'narrow' with {self.ids} ids stores integer arrays that can hold them, got dtype "
                f"{array.dtype!s}"
            )
        items = np.ascontiguousarray(array).reshape(-1)
        codes = np.empty(items.size, self._code)
        for start in range(0, items.size, _BLOCK_ITEMS):
            block = items[start : start + _BLOCK_ITEMS]
            self._require_ids(block)
            # The cast keeps the low bits, which turns -1 into the largest code.
            np.copyto(codes[start : start + _BLOCK_ITEMS], block, casting="unsafe")
        return codes

    def _require_ids(self, block: np.ndarray) -> None:
        # Read as unsigned, -1 is the largest value: where there is none, one pass tells.
        if int(block.view(block.dtype.str.replace("i", "u")).max()) < self.ids:
            return
        least, largest = int(block.min()), int(block.max())
        if least < -1 or largest >= self.ids:
            raise CodecError(
                f"codec 'narrow' stores ids in [-1, {self.ids}), got values from {least} to {largest}; "
                "configure it with the model's number of ids"
            )

    def decode(
        self,
        data: memoryview,
        dtype: np.dtype,
        shape: tuple[int, ...],
        start_row: int,
        rows: tuple[int, int] | None = None,
    ) -> np.ndarray:
        if len(data) != math.prod(shape) * self._code.itemsize:
            raise CorruptObjectError(
                f"codec 'narrow' needs {math.prod(shape) * self._code.itemsize} bytes for shape {shape}, "
                f"got {len(data)}"
            )
        codes = np.frombuffer(data, dtype=self._code).reshape(shape)
        if rows is not None:
            codes = codes[rows[0] : rows[1]]
        if dtype.kind == "i" and self.ids <= self._signed_ids:
            return self._decode_signed(codes, dtype)
        return self._decode_unsigned(codes, dtype)

    def _decode_signed(self, codes: np.ndarray, dtype: np.dtype) -> np.ndarray:
        # Read as a signed integer the code of -1 is -1, and no id uses the sign bit.
        signed = codes.view(self._code.str.replace("u", "i"))
        if signed.size and (int(signed.min()) < -1 or int(signed.max()) >= self.ids):
            raise self._no_id(dtype)
        out = new_array(signed.shape, dtype)
        np.copyto(out, signed)
        return out

    def _decode_unsigned(self, codes: np.ndarray, dtype: np.dtype) -> np.ndarray:
        out = new_array(codes.shape, dtype)
        flat_codes, flat_out = codes.reshape(-1), out.reshape(-1)
        one = self._code.type(1)
        least_allowed = 0 if dtype.kind == "i" else 1
        for start in range(0, flat_codes.size, _BLOCK_ITEMS):
            # Adding 1 wraps the code of -1 to 0, so that two comparisons check all and a subtraction in the
            # wider type restores all.
            block = flat_codes[start : start + _BLOCK_ITEMS] + one
            if int(block.max()) > self.ids or int(block.min()) < least_allowed:
                raise self._no_id(dtype)
            target = flat_out[start : start + _BLOCK_ITEMS]
            target[...] = block
            target -= 1
        return out

    def _no_id(self, dtype: np.dtype) -> CorruptObjectError:
        return CorruptObjectError(
            f"codec 'narrow' found a code that is no id in [-1, {self.ids}) of {dtype!s}"
        )

    def _holds_ids(self, dtype: np.dtype) -> bool:
        return dtype.kind in "iu" and 1 << (8 * dtype.itemsize - (dtype.kind == "i")) >= self.ids

    def check(self, dtype: np.dtype, shape: tuple[int, ...], stored_bytes: int, start_row: int = 0) -> None:
        if not self._holds_ids(dtype):
            raise RefError(
                f"codec 'narrow' with {self.ids} ids returns integer arrays that can hold them, got {dtype!s}"
            )
        expected_bytes = math.prod(shape) * self._code.itemsize
        if stored_bytes != expected_bytes:
            raise RefError(
                f"codec 'narrow' with {self.ids} ids stores shape {shape} in {expected_bytes} bytes, "
                f"got stored_bytes {stored_bytes}"
            )
