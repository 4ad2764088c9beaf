"""`StoreRef`: the versioned reference that travels in a response in place of the arrays.

The format is plain JSON types and is described for other implementations in docs/wire-format.md.
A reference is untrusted input: `from_builtins` checks everything that can be checked without reading the store.
"""

from typing import Any

import msgspec

REF_VERSION = 1


class FieldSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One stored field: what the reader gets back, and how it is stored."""

    dtype: str
    """numpy name of the array that was put and will be returned, such as "int32"."""
    shape: tuple[int, ...]
    """Shape of that array."""
    codec: str
    """Registered codec name."""
    codec_config: dict[str, str | int | bool] = {}
    """What `Codec.from_config` needs to decode."""
    stored_bytes: int
    """Length of the encoded payload."""
    start_row: int = 0
    """Absolute row of the array's row 0 (see the row rule)."""
    checksum: str
    """Of the encoded payload, "crc32:" and eight lower-case hex digits."""


class StoreRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reference to one stash: field f lies in the store under the key `<key>/<f>`."""

    version: int = REF_VERSION
    backend: str
    """Registered backend name."""
    key: str
    """Full key, prefix included; never reused."""
    fields: dict[str, FieldSpec]

    @classmethod
    def from_builtins(cls, data: Any) -> "StoreRef":
        """Parse and validate plain JSON types. Raises RefError; reads nothing."""
        raise NotImplementedError

    def to_builtins(self) -> dict[str, Any]:
        """Plain JSON types, safe for JSON and for strict msgpack."""
        return msgspec.to_builtins(self)
