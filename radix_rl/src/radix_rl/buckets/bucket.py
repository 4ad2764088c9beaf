"""`WeightBucket`: many named tensors flattened into one byte buffer.

It is the unit that travels from trainer to engine.
"""

import math
from collections.abc import Iterable, Iterator

import msgspec
import torch

ALIGNMENT_BYTES = 16
"""Tensors start at multiples of it: enough for a typed view of any dtype."""


def dtype_name(dtype: torch.dtype) -> str:
    """torch name without the module."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """The inverse.

    Raises ValueError for a name that torch does not have, and for one whose elements it cannot cast.
    """
    dtype = getattr(torch, name, None)
    if dtype == torch.float4_e2m1fn_x2:
        raise ValueError(
            f"tensor dtype {name!r} packs two numbers into an element and cannot be cast; send them unpacked"
        )
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"unknown tensor dtype {name!r}; expected a torch name such as 'bfloat16' or 'float32'"
        )
    return dtype


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    """torch name without the module, such as "bfloat16"."""
    shape: tuple[int, ...]
    start_byte: int
    end_byte: int


class WeightBucket(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Tensors in `specs` order, each at its byte offset of `buffer` ([bytes] uint8).

    Raises ValueError at construction if a spec does not lie in the buffer, disagrees with its own shape or
    is none of a tensor.
    """

    specs: tuple[TensorSpec, ...]
    buffer: torch.Tensor

    def __post_init__(self) -> None:
        if self.buffer.dtype != torch.uint8 or self.buffer.dim() != 1:
            raise ValueError(
                f"bucket buffer: expected [bytes] uint8, got {self.buffer.dtype} {tuple(self.buffer.shape)}"
            )
        previous_end = 0
        for spec in self.specs:
            item_bytes = dtype_from_name(spec.dtype).itemsize
            needed = math.prod(spec.shape) * item_bytes
            if any(size < 0 for size in spec.shape) or spec.end_byte - spec.start_byte != needed:
                raise ValueError(
                    f"tensor {spec.name!r}: {spec.end_byte - spec.start_byte} bytes, expected {needed} for "
                    f"shape {spec.shape} of {spec.dtype}"
                )
            if (
                spec.start_byte < previous_end
                or spec.end_byte > self.buffer.numel()
                or spec.start_byte % item_bytes
            ):
                raise ValueError(
                    f"tensor {spec.name!r}: bytes [{spec.start_byte}, {spec.end_byte}) overlap the tensor "
                    f"before, leave the buffer of {self.buffer.numel()} bytes or are not aligned to "
                    f"{item_bytes}"
                )
            previous_end = spec.end_byte
        try:
            # Sizes that overflow and dtypes without plain elements show only here.
            for _ in self.tensors():
                pass
        except (RuntimeError, TypeError, OverflowError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"weight bucket: a tensor cannot be viewed: {reason}") from error

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views into `buffer`, with name."""
        for spec in self.specs:
            flat = self.buffer[spec.start_byte : spec.end_byte].view(dtype_from_name(spec.dtype))
            yield spec.name, flat.view(spec.shape)


def pack_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[WeightBucket]:
    """Group tensors, in order, into buckets of at most `bucket_bytes`.

    A larger tensor gets a bucket of its own.

    A tensor is never split. Each bucket is a fresh copy on its tensors' device, owned by the receiver, so
    that training may go on while it travels. Raises ValueError for a name that comes twice.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes: expected at least 1, got {bucket_bytes!r}")
    seen: set[str] = set()
    group: list[tuple[str, torch.Tensor]] = []
    used_bytes = 0
    for name, tensor in named_tensors:
        if name in seen:
            raise ValueError(f"tensor {name!r} comes twice in one weight update")
        seen.add(name)
        padded = _aligned(tensor.numel() * tensor.element_size())
        if group and (used_bytes + padded > bucket_bytes or tensor.device != group[0][1].device):
            yield _pack(group)
            group, used_bytes = [], 0
        group.append((name, tensor))
        used_bytes += padded
    if group:
        yield _pack(group)


def _pack(group: list[tuple[str, torch.Tensor]]) -> WeightBucket:
    specs: list[TensorSpec] = []
    start = 0
    for name, tensor in group:
        end = start + tensor.numel() * tensor.element_size()
        shape = tuple(tensor.shape)
        specs.append(
            TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=shape, start_byte=start, end_byte=end)
        )
        start = _aligned(end)
    # Zeros, not empty: the padding bytes travel too, and equal weights must give equal bytes.
    buffer = torch.zeros(start, dtype=torch.uint8, device=group[0][1].device)
    bucket = WeightBucket(specs=tuple(specs), buffer=buffer)
    for (_, target), (_, source) in zip(bucket.tensors(), group, strict=True):
        target.copy_(source.detach())
    return bucket


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
