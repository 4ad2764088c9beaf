"""`WeightBucket`: many named tensors flattened into one byte buffer, the unit that travels from trainer to engine."""

from collections.abc import Iterable, Iterator

import msgspec
import torch


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    """torch name without the module, such as "bfloat16"."""
    shape: tuple[int, ...]
    start_byte: int
    end_byte: int


class WeightBucket(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Tensors in `specs` order, each at its byte offset of `buffer` ([bytes] uint8)."""

    specs: tuple[TensorSpec, ...]
    buffer: torch.Tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views into `buffer`, with name."""
        raise NotImplementedError


def pack_buckets(named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[WeightBucket]:
    """Group tensors, in order, into buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own."""
    raise NotImplementedError
