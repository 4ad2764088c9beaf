"""SGLang's flattened bucket: tensors one right after the other, without the padding of `WeightBucket`."""

import math
from collections.abc import Sequence

import torch

from radix_rl.buckets.bucket import TensorSpec, WeightBucket, dtype_from_name


def empty_bucket(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    device: torch.device,
    *,
    packed: bool,
) -> WeightBucket:
    """Room for tensors that come.

    `packed`: one right after the other, as SGLang lays them out; else each at an aligned place of its own.

    Raises ValueError for lists that do not go together, a dtype or shape that is none, and a packed tensor
    that is not aligned to its items.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError(
            f"names, dtypes and shapes: expected lists of one length, got {len(names)}, {len(dtypes)} and "
            f"{len(shapes)}"
        )
    if not names:
        raise ValueError("names: expected at least one tensor, got none")
    if len(set(names)) != len(names):
        raise ValueError("names: a tensor name comes twice")
    specs: list[TensorSpec] = []
    start = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        item_bytes = dtype_from_name(dtype.removeprefix("torch.")).itemsize
        if any(size < 0 for size in shape):
            raise ValueError(f"shapes: {name!r} has a negative size: {list(shape)}")
        if not packed:
            start = -(-start // 16) * 16
        end = start + math.prod(shape) * item_bytes
        specs.append(
            TensorSpec(
                name=name,
                dtype=dtype.removeprefix("torch."),
                shape=tuple(shape),
                start_byte=start,
                end_byte=end,
            )
        )
        start = end
    try:
        buffer = torch.empty(start, dtype=torch.uint8, device=device)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ValueError(f"shapes: {start} bytes of tensors have no room: {error}") from error
    return WeightBucket(specs=tuple(specs), buffer=buffer)


def pack(bucket: WeightBucket, device: torch.device) -> WeightBucket:
    """The same tensors without padding, on `device`. Larger items come first, so that all are aligned."""
    tensors = sorted(bucket.tensors(), key=lambda item: -item[1].element_size())
    packed = empty_bucket(
        [name for name, _ in tensors],
        [str(tensor.dtype) for _, tensor in tensors],
        [tensor.shape for _, tensor in tensors],
        device,
        packed=True,
    )
    for (_, target), (_, source) in zip(packed.tensors(), tensors, strict=True):
        target.copy_(source)
    return packed
