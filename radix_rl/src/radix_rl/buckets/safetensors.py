"""SGLang's JSON body of `/update_weights_from_tensor` with safetensors in place of pickles.

Each text of `serialized_named_tensors` is base64. SGLang puts a pickle there, which runs code of whoever
sends it; here it is a file in safetensors' format:

- without `load_format`: the named tensors themselves;
- `flattened_bucket`: one tensor `flattened_tensor` ([bytes] uint8) and, under the key `metadata` of the
  file's own metadata, a JSON list of `{"name", "dtype", "shape", "start_idx", "end_idx"}` with byte offsets.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from radix_rl.buckets.bucket import TensorSpec, WeightBucket, pack_buckets

_FLAT = "flattened_tensor"
_METADATA = "metadata"
_ONE_BUCKET = 1 << 62
_HEADER_START = 8
"""A safetensors file is its header's length in 8 bytes, then the header, which begins with a brace."""
_PICKLE_STARTS = (*(bytes((0x80, protocol)) for protocol in range(2, 6)), b"PK\x03\x04")
"""First bytes of pickle's binary protocols, and of the archive of pickles that torch.save writes."""


class _FlatSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    start_idx: int
    end_idx: int
    numel: int | None = None
    """SGLang's name for the bytes."""


def encode_named_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """One text of `serialized_named_tensors`, without `load_format`."""
    return base64.b64encode(save({name: tensor.contiguous() for name, tensor in tensors.items()})).decode(
        "ascii"
    )


def encode_flattened(bucket: WeightBucket) -> str:
    """One text of `serialized_named_tensors` with `load_format` "flattened_bucket"."""
    specs = [
        {
            "name": spec.name,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "start_idx": spec.start_byte,
            "end_idx": spec.end_byte,
        }
        for spec in bucket.specs
    ]
    data = save({_FLAT: bucket.buffer.cpu()}, metadata={_METADATA: json.dumps(specs)})
    return base64.b64encode(data).decode("ascii")


def decode_named_tensors(text: str, load_format: str | None) -> WeightBucket:
    """The tensors of one text of `serialized_named_tensors`.

    Raises ValueError that says what is expected for a pickle and for anything else that is not safetensors.
    """
    if load_format not in (None, "flattened_bucket"):
        raise ValueError(f'load_format: expected null or "flattened_bucket", got {load_format!r}')
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"serialized_named_tensors: not base64: {error}") from error
    # A header's length may begin with any byte, a pickle's first one too: the brace tells them apart.
    if data[_HEADER_START : _HEADER_START + 1] != b"{" and data.startswith(_PICKLE_STARTS):
        raise ValueError(
            "serialized_named_tensors: this is a pickle, which is refused unread, since unpickling runs the "
            "sender's code; send base64 of safetensors bytes (safetensors.torch.save) in its place, or the "
            "binary body of docs/server.md"
        )
    try:
        tensors = load(data)
    except (SafetensorError, KeyError) as error:
        raise ValueError(
            "serialized_named_tensors: expected base64 of safetensors bytes (safetensors.torch.save), got "
            f"{len(data)} bytes of something else: {error}"
        ) from error
    if load_format is None:
        if not tensors:
            raise ValueError("serialized_named_tensors: expected at least one tensor, got none")
        (bucket,) = pack_buckets(tensors.items(), _ONE_BUCKET)
        return bucket
    return _flattened(data, tensors)


def _flattened(data: bytes, tensors: dict[str, torch.Tensor]) -> WeightBucket:
    flat = tensors.get(_FLAT)
    if flat is None or len(tensors) != 1 or flat.dtype != torch.uint8 or flat.dim() != 1:
        found = {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()}
        raise ValueError(f"flattened_bucket: expected one tensor {_FLAT!r} of [bytes] uint8, got {found!r}")
    text = _metadata_of(data).get(_METADATA)
    try:
        specs = msgspec.json.decode(text or "", type=tuple[_FlatSpec, ...])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(
            f"flattened_bucket: the file's metadata needs {_METADATA!r}, a JSON list of name, dtype, shape, "
            f"start_idx and end_idx: {error}"
        ) from error
    if not specs or len({spec.name for spec in specs}) != len(specs):
        raise ValueError("flattened_bucket: expected at least one tensor and no name twice")
    return WeightBucket(
        specs=tuple(
            TensorSpec(
                name=spec.name,
                dtype=spec.dtype.removeprefix("torch."),
                shape=spec.shape,
                start_byte=spec.start_idx,
                end_byte=spec.end_idx,
            )
            for spec in specs
        ),
        buffer=flat.clone(),
    )


def _metadata_of(data: bytes) -> dict[str, Any]:
    """The header's own metadata; `data` is a file that safetensors has read, so that it has a header."""
    length = int.from_bytes(data[:_HEADER_START], "little")
    return json.loads(data[_HEADER_START : _HEADER_START + length]).get("__metadata__") or {}
