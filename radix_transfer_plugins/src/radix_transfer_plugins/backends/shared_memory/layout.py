"""What the files of a space look like.

<directory>/
  lock                 flocked for every change of the accounting and of the names
  usage                journal state, bytes and objects in use by all processes
  clients/<id>         bytes that one process reserved and has not published; flocked while it lives
  objects/<name>       one per object: header, key, padding to 64 bytes, payload

A batch of several keys is published under the lock: journal CHANGING, names appear with PENDING headers,
journal COMMITTED (the commit point, one store), headers become VISIBLE, journal IDLE. Who takes the lock and
finds the journal not IDLE follows a killed process, and rolls forward or back; who meets a PENDING header
takes the lock first, then looks again. Single objects are visible as soon as they are named; they and
removals use the journal for the sake of the accounting.
"""

import functools
import hashlib
import struct
from typing import NamedTuple
from urllib.parse import quote, unquote

from radix_transfer_plugins.errors import CorruptObjectError

ALIGNMENT = 64
MAGIC = b"RADIXSM1"
PENDING = 0
VISIBLE = 1
VISIBILITY_OFFSET = 8

_HEADER = struct.Struct("<8sQQQI28x")
HEADER_BYTES = _HEADER.size
_MAX_PLAIN_NAME = 180

USAGE = struct.Struct("<8sQQQ")
"""magic, journal state, bytes (reserved ones too), objects."""
RESERVED = struct.Struct("<Q")
IDLE, CHANGING, COMMITTED = range(3)


class Header(NamedTuple):
    visibility: int
    payload_bytes: int
    created_ns: int
    key: str

    @property
    def payload_offset(self) -> int:
        return payload_offset(self.key)


def payload_offset(key: str) -> int:
    return -(-(HEADER_BYTES + len(key.encode())) // ALIGNMENT) * ALIGNMENT


def pack_header(header: Header) -> bytes:
    """Header, key and padding: what lies in front of the payload."""
    key = header.key.encode()
    fixed = _HEADER.pack(MAGIC, header.visibility, header.payload_bytes, header.created_ns, len(key))
    return (fixed + key).ljust(payload_offset(header.key), b"\0")


def key_bytes(data: bytes) -> int:
    """Length of the key as the header's first bytes give it; 0 if they are no header."""
    return _HEADER.unpack_from(data)[-1] if len(data) >= HEADER_BYTES and data[:8] == MAGIC else 0


def unpack_header(data: bytes, name: str, file_bytes: int) -> Header:
    """`data` begins with the header and the key. Raises CorruptObjectError; `name` is for its message."""
    if len(data) >= HEADER_BYTES:
        magic, visibility, payload_bytes, created_ns, length = _HEADER.unpack_from(data)
        key = data[HEADER_BYTES : HEADER_BYTES + length]
        if magic == MAGIC and len(key) == length and visibility in (PENDING, VISIBLE):
            try:
                header = Header(visibility, payload_bytes, created_ns, key.decode())
            except UnicodeDecodeError:
                pass
            else:
                expected = header.payload_offset + payload_bytes
                if file_bytes == expected and object_name(header.key) == name:
                    return header
                if file_bytes != expected:
                    raise CorruptObjectError(
                        f"object {header.key!r}: its file should hold {expected} bytes and holds "
                        f"{file_bytes}; it was truncated or overwritten from outside. Delete it"
                    )
    raise CorruptObjectError(
        f"file {name!r} of the space holds no valid object header; it was not written by this store"
    )


@functools.lru_cache(maxsize=4096)
def object_name(key: str) -> str:
    """A safe file name: the key percent-encoded, or, where that is too long, its hash."""
    plain = "k-" + quote(key, safe="")
    return plain if len(plain) <= _MAX_PLAIN_NAME else "h-" + hashlib.sha256(key.encode()).hexdigest()


def key_of_name(name: str) -> str | None:
    """The key that a plain name spells; None for a hash, and for what no key is spelt as."""
    try:
        key = unquote(name.removeprefix("k-"), errors="strict")
    except UnicodeDecodeError:
        return None
    return key if object_name(key) == name else None


def name_prefix(prefix: str) -> str:
    """Plain names of keys that start with `prefix` start with this."""
    return "k-" + quote(prefix, safe="")
