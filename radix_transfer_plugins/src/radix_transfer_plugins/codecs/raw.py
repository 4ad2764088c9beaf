"""`raw`: the array's own bytes, row-major and little-endian."""

import math
from typing import ClassVar

import numpy as np

from radix_transfer_plugins.codecs.base import Buffer, Codec
from radix_transfer_plugins.errors import CodecError, CorruptObjectError, RefError


class RawCodec(Codec):
    """Any boolean or numeric array. Ordered. Decoding is a view over the stored bytes."""

    name: ClassVar[str] = "raw"
    ordered: ClassVar[bool] = True
    row_addressable: ClassVar[bool] = True

    def row_bytes(self, dtype: np.dtype, shape: tuple[int, ...]) -> int | None:
        return math.prod(shape[1:]) * dtype.itemsize if shape else None

    def encode(self, array: np.ndarray, start_row: int) -> Buffer:
        if array.dtype.kind not in "biufc":
            raise CodecError(f"codec 'raw' stores boolean and numeric arrays, got dtype {array.dtype!s}")
        return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))

    def decode(
        self,
        data: memoryview,
        dtype: np.dtype,
        shape: tuple[int, ...],
        start_row: int,
        rows: tuple[int, int] | None = None,
    ) -> np.ndarray:
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise CorruptObjectError(
                f"codec 'raw' needs {math.prod(shape) * dtype.itemsize} bytes for shape {shape} of "
                f"{dtype!s}, got {len(data)}"
            )
        wire = np.frombuffer(data, dtype=dtype.newbyteorder("<")).reshape(shape)
        if rows is not None:
            wire = wire[rows[0] : rows[1]]
        if dtype.kind == "b" and wire.size and wire.view(np.uint8).max() > 1:
            raise CorruptObjectError("codec 'raw' found a byte other than 0 and 1 in a boolean array")
        return wire.astype(dtype, copy=False)

    def check(self, dtype: np.dtype, shape: tuple[int, ...], stored_bytes: int, start_row: int = 0) -> None:
        expected_bytes = math.prod(shape) * dtype.itemsize
        if stored_bytes != expected_bytes:
            raise RefError(
                f"codec 'raw' stores shape {shape} of {dtype!s} in {expected_bytes} bytes, got "
                f"stored_bytes {stored_bytes}"
            )
