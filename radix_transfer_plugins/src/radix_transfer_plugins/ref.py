"""`StoreRef`: the versioned reference that travels in a response in place of the arrays.

The format is plain JSON types and is described for other implementations in docs/wire-format.md.
A reference is untrusted input: everything that can be checked without reading the store is checked when one
is made.
"""

import math
import re
from typing import Any

import msgspec
import numpy as np

from radix_transfer_plugins.codecs.base import Codec
from radix_transfer_plugins.errors import ConfigError, RefError
from radix_transfer_plugins.keys import KEY_RULE, is_field_name, is_key
from radix_transfer_plugins.registry import backend_names, codec_names, get_codec, knows_backend, knows_codec

REF_VERSION = 1
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
MAX_DIMENSIONS = 16
MAX_FIELDS = 64
MAX_CODEC_OPTIONS = 16
MAX_TEXT_LENGTH = 128
MAX_COUNT = 2**53 - 1
"""Largest dimension, row and byte count: the largest integer that every JSON implementation keeps exact."""

_CHECKSUM = re.compile(r"crc32:[0-9a-f]{8}", re.ASCII)
_PATH = re.compile(r" - at `?\$([^`]*)`?\Z")


class FieldSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One stored field: what the reader gets back, and how it is stored.

    Raises RefError unless it is consistent.
    """

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
    """Checksum of the encoded payload: "crc32:" and eight lower-case hex digits."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise _problem(f"unknown dtype {_show(self.dtype)}; known dtypes: {', '.join(DTYPES)}", ".dtype")
        _check_shape(self.shape, self.numpy_dtype.itemsize)
        _check_count(self.stored_bytes, ".stored_bytes")
        _check_count(self.start_row, ".start_row")
        if self.start_row and not self.shape:
            raise _problem("a field without rows has no start_row", ".start_row")
        if _CHECKSUM.fullmatch(self.checksum) is None:
            raise _problem(
                f"expected 'crc32:' and 8 lower-case hex digits, got {_show(self.checksum)}", ".checksum"
            )
        codec = self.make_codec()
        try:
            codec.check(self.numpy_dtype, self.shape, self.stored_bytes, self.start_row)
        except RefError as error:
            raise _problem(str(error), "") from error

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(self.dtype)

    @property
    def array_bytes(self) -> int:
        """Size of the decoded array."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @property
    def end_row(self) -> int:
        """Absolute row after the last."""
        return self.start_row + (self.shape[0] if self.shape else 0)

    def make_codec(self) -> Codec:
        """The codec that decodes this field. Raises RefError."""
        if not knows_codec(self.codec):
            raise _problem(
                f"unknown codec {_show(self.codec)}; known codecs: {', '.join(codec_names())}", ".codec"
            )
        _check_codec_config(self.codec_config)
        try:
            return get_codec(self.codec).from_config(self.codec_config)
        except ConfigError as error:
            raise _problem(str(error), ".codec_config") from error


class StoreRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reference to one stash: field f lies in the store under the key `<key>/<f>`.

    Raises RefError unless it is consistent.
    """

    version: int = REF_VERSION
    backend: str
    """Registered backend name."""
    key: str
    """Full key, prefix included; never reused."""
    fields: dict[str, FieldSpec]

    def __post_init__(self) -> None:
        _check_version(self.version)
        if not knows_backend(self.backend):
            known = ", ".join(backend_names())
            raise _problem(f"unknown backend {_show(self.backend)}; known backends: {known}", ".backend")
        if not is_key(self.key):
            raise _problem(f"expected a key ({KEY_RULE}), got {_show(self.key)}", ".key")
        _check_field_names(self.fields)

    @classmethod
    def from_builtins(cls, data: Any) -> "StoreRef":
        """Parse and validate plain JSON types. Raises RefError; reads nothing."""
        if not isinstance(data, dict):
            raise _problem(f"expected an object, got {_show(data)}", "")
        # First, since other versions may have other members.
        _check_version(data.get("version", REF_VERSION))
        raw_fields = data.get("fields", {})
        if not isinstance(raw_fields, dict):
            raise _problem(f"expected an object, got {_show(raw_fields)}", ".fields")
        _check_field_names(raw_fields)
        fields = {name: _convert(spec, FieldSpec, f".fields.{name}") for name, spec in raw_fields.items()}
        return _convert({**data, "fields": fields} if "fields" in data else data, cls, "")

    def to_builtins(self) -> dict[str, Any]:
        """Plain JSON types, safe for JSON and for strict msgpack."""
        return {
            "version": self.version,
            "backend": self.backend,
            "key": self.key,
            "fields": {
                name: {**msgspec.to_builtins(spec), "shape": list(spec.shape)}
                for name, spec in self.fields.items()
            },
        }

    def field_key(self, name: str) -> str:
        """Key of the stored bytes of one field."""
        return f"{self.key}/{name}"


def _problem(message: str, path: str) -> RefError:
    return RefError(f"{message} - at ${path}")


def _show(value: object) -> str:
    """A short repr that no hostile value can make fail or grow."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:60] + "...")
    if isinstance(value, bool | float | None):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
    return f"`{type(value).__name__}`"


def _convert(data: object, to: type[Any], path: str) -> Any:
    """msgspec's conversion, with errors that tell the path from the reference's root."""
    try:
        return msgspec.convert(data, to)
    except (msgspec.ValidationError, RefError) as error:
        message = str(error)
        found = _PATH.search(message)
        inner = found.group(1) if found else ""
        message = message[: found.start()] if found else message
        # An error raised while a nested value was made carries its own path and the path to it.
        nested = _PATH.search(message)
        if nested:
            inner, message = inner + nested.group(1), message[: nested.start()]
        raise _problem(message, path + inner) from error
    except (OverflowError, RecursionError, ValueError, TypeError) as error:
        raise _problem(f"cannot be parsed: {type(error).__name__}", path) from error


def _check_version(version: object) -> None:
    if version != REF_VERSION or isinstance(version, bool | float):
        raise _problem(f"unknown version {_show(version)}; known versions: {REF_VERSION}", ".version")


def _check_field_names(fields: dict[Any, Any]) -> None:
    if len(fields) > MAX_FIELDS:
        raise _problem(f"expected at most {MAX_FIELDS} fields, got {len(fields)}", ".fields")
    for name in fields:
        if not isinstance(name, str) or not is_field_name(name):
            raise _problem(
                f"expected field names of ASCII letters, digits and _, got {_show(name)}", ".fields"
            )


def _check_count(value: int, path: str) -> None:
    if not 0 <= value <= MAX_COUNT:
        raise _problem(f"expected an integer in [0, 2^53), got {_show(value)}", path)


def _check_shape(shape: tuple[int, ...], itemsize: int) -> None:
    if len(shape) > MAX_DIMENSIONS:
        raise _problem(f"expected at most {MAX_DIMENSIONS} dimensions, got {len(shape)}", ".shape")
    extent_bytes = itemsize
    for axis, count in enumerate(shape):
        _check_count(count, f".shape[{axis}]")
        # numpy too refuses empty arrays whose other dimensions overflow.
        extent_bytes *= max(count, 1)
    if extent_bytes > MAX_COUNT:
        raise _problem(f"expected an array of less than 2^53 bytes, got shape {list(shape)}", ".shape")


def _check_codec_config(config: dict[str, str | int | bool]) -> None:
    if len(config) > MAX_CODEC_OPTIONS:
        raise _problem(f"expected at most {MAX_CODEC_OPTIONS} options, got {len(config)}", ".codec_config")
    for name, value in config.items():
        if not is_field_name(name):
            raise _problem(
                f"expected option names of ASCII letters, digits and _, got {_show(name)}", ".codec_config"
            )
        if isinstance(value, str) and len(value) > MAX_TEXT_LENGTH:
            raise _problem(
                f"expected at most {MAX_TEXT_LENGTH} characters, got {_show(value)}", f".codec_config.{name}"
            )
        if isinstance(value, int) and abs(value) > MAX_COUNT:
            raise _problem(f"expected an integer below 2^53, got {_show(value)}", f".codec_config.{name}")
