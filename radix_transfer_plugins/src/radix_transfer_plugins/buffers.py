"""Byte views of the buffers that codecs produce and backends store."""

import functools
import zlib
from collections.abc import Callable

import numpy as np

from radix_transfer_plugins.codecs.base import Buffer


def byte_view(buffer: Buffer) -> memoryview:
    """The buffer's bytes as a flat memoryview, without a copy; also of empty and multi-dimensional arrays."""
    if isinstance(buffer, np.ndarray):
        # memoryview.cast refuses arrays with a zero in their shape.
        return buffer.reshape(-1).view(np.uint8).data if buffer.size else memoryview(b"")
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


def checksum_of(data: memoryview) -> str:
    """The checksum as references spell it: "crc32:" and eight lower-case hex digits (the CRC-32 of zlib)."""
    checksum = Checksum()
    checksum.add(data)
    return str(checksum)


class Checksum:
    """A checksum of data that comes in pieces; as text it is what `checksum_of` gives for all of it."""

    def __init__(self) -> None:
        self._crc32 = 0

    def add(self, data: memoryview) -> None:
        self._crc32 = _crc32()(data, self._crc32)

    def __str__(self) -> str:
        return f"crc32:{self._crc32:08x}"


@functools.cache
def _crc32() -> Callable[[memoryview, int], int]:
    """zlib-ng's, which gives the same values several times faster, where the extra "fast" is installed."""
    try:
        from zlib_ng import zlib_ng
    except ImportError:
        return zlib.crc32
    return zlib_ng.crc32
