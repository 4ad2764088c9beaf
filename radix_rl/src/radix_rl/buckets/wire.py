"""One `WeightBucket` as one binary body: what a trainer sends to `/update_weights_from_tensor`.

Nothing is unpickled.

Layout, all integers little-endian:

    bytes 0..3    magic "RXWB"
    bytes 4..7    uint32, format version (1)
    bytes 8..15   uint64, length H of the header
    H bytes       JSON object {"buffer_bytes": int, "crc32": int, "tensors": [{"name", "dtype", "shape",
                  "start_byte", "end_byte"}]}; `crc32` is that of the buffer
    the rest      the buffer, `buffer_bytes` long; offsets count from its first byte
"""

import zlib

import msgspec
import numpy as np
import torch

from radix_rl.buckets.bucket import TensorSpec, WeightBucket

OWNER_HEADER = "X-Radix-Update-Owner"
"""A client's name for itself in control calls: whose pause and weight update they belong to."""
CONTENT_TYPE = "application/x-radix-weight-bucket"

_MAGIC = b"RXWB"
_VERSION = 1
_FIXED_BYTES = 16
_MAX_HEADER_BYTES = 64 << 20


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    buffer_bytes: int
    crc32: int
    tensors: tuple[TensorSpec, ...]


def encode_bucket(bucket: WeightBucket) -> bytes:
    """The body. Copies the buffer to host memory if it lies on a device."""
    buffer = bucket.buffer.detach().cpu().contiguous().numpy().data
    header = msgspec.json.encode(
        _Header(buffer_bytes=buffer.nbytes, crc32=zlib.crc32(buffer), tensors=bucket.specs)
    )
    fixed = _MAGIC + _VERSION.to_bytes(4, "little") + len(header).to_bytes(8, "little")
    return b"".join((fixed, header, buffer))


def decode_bucket(body: bytes | bytearray | memoryview) -> WeightBucket:
    """The bucket, in memory of its own that is aligned for every dtype.

    Raises ValueError for any body that `encode_bucket` cannot have made.
    """
    data = memoryview(body)
    if len(data) < _FIXED_BYTES or data[:4] != _MAGIC:
        raise ValueError(
            f"weight bucket: expected a body that starts with {_MAGIC!r}, got {bytes(data[:4])!r}"
        )
    version = int.from_bytes(data[4:8], "little")
    if version != _VERSION:
        raise ValueError(f"weight bucket: expected format version {_VERSION}, got {version!r}")
    header_bytes = int.from_bytes(data[8:16], "little")
    if header_bytes > min(_MAX_HEADER_BYTES, len(data) - _FIXED_BYTES):
        raise ValueError(
            f"weight bucket: a header of {header_bytes} bytes does not fit a body of {len(data)} bytes"
        )
    end = _FIXED_BYTES + header_bytes
    try:
        header = msgspec.json.decode(data[_FIXED_BYTES:end], type=_Header)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"weight bucket: malformed header: {error}") from error
    payload = data[end:]
    if len(payload) != header.buffer_bytes:
        raise ValueError(
            f"weight bucket: expected a buffer of {header.buffer_bytes} bytes, got {len(payload)}"
        )
    if zlib.crc32(payload) != header.crc32:
        raise ValueError("weight bucket: the buffer fails its checksum; send it again")
    names = [spec.name for spec in header.tensors]
    if len(set(names)) != len(names):
        raise ValueError("weight bucket: a tensor name comes twice")
    buffer = torch.empty(len(payload), dtype=torch.uint8)
    buffer.numpy()[:] = np.frombuffer(payload, np.uint8)
    return WeightBucket(specs=header.tensors, buffer=buffer)
