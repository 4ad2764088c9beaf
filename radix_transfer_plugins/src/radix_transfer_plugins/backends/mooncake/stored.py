"""What an object looks like inside Mooncake: its key, and its value with a trailer."""

import secrets
import struct
import time
from typing import NamedTuple, Self
from urllib.parse import quote, unquote

from radix_transfer_plugins.errors import CorruptObjectError

_TRAILER = struct.Struct("<8sQ8s")
TRAILER_BYTES = _TRAILER.size
_MAGIC = b"RADIXOB1"
# Everything else is percent-encoded: the master lists keys one a line.
_PLAIN = "/._=:@+-~"


class Trailer(NamedTuple):
    """24 bytes behind every payload.

    Mooncake keeps neither a time nor values of zero bytes, and a put that loses against another one of the
    same key looks like a success; the time of the put, the bytes themselves and the put's mark make up for
    that.
    """

    created_us: int
    mark: bytes
    """8 random bytes, one value for each put."""

    @classmethod
    def new(cls) -> Self:
        return cls(time.time_ns() // 1000, secrets.token_bytes(8))

    def pack(self) -> bytes:
        return _TRAILER.pack(_MAGIC, self.created_us, self.mark)

    @classmethod
    def unpack(cls, data: bytes | memoryview, key: str) -> Self:
        if len(data) == TRAILER_BYTES:
            magic, created_us, mark = _TRAILER.unpack(data)
            if magic == _MAGIC:
                return cls(created_us, mark)
        raise CorruptObjectError(
            f"mooncake: object {key!r} does not end with this store's trailer: it was cut, or written by "
            "something else"
        )


def stored_key(key: str) -> str:
    return quote(key, safe=_PLAIN)


def original_key(stored: str) -> str:
    return unquote(stored, errors="strict")
