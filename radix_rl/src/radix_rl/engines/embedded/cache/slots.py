"""`SlotTensor` and `SlotCache`: the preallocated memory in which running requests keep what they computed.

Each running request owns one slot; slots have equal length (`stride` tokens), so that the first n of them are
one strided tensor `[n, heads, stride, width]` that attention reads without gathering. When the largest
running request changes, the same memory is divided into slots of another stride.
"""

import math
from collections.abc import Callable, Sequence

import torch

STRIDE_MULTIPLE = 16
"""Slots are a multiple of it long, so that similar requests share one division of the memory."""


def round_up_tokens(tokens: int) -> int:
    return -(-tokens // STRIDE_MULTIPLE) * STRIDE_MULTIPLE


class SlotTensor:
    """One cached quantity of all slots: `[slots, heads, stride, width]`.

    A view of flat memory owned by this object.
    """

    def __init__(
        self, *, capacity_tokens: int, heads: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.heads = heads
        self.width = width
        self.dtype = dtype
        self._device = device
        self._capacity_tokens = capacity_tokens
        self._stride = capacity_tokens
        self.allocate()

    def allocate(self) -> None:
        """Allocate the memory, filled with zeros.

        Attention multiplies masked positions by 0, and 0 times what fresh memory holds may be NaN.
        """
        self._flat = torch.zeros(
            self._capacity_tokens * self.heads, self.width, dtype=self.dtype, device=self._device
        )
        self.set_stride(self._stride)

    def release(self) -> None:
        self._flat = torch.empty(0, self.width, dtype=self.dtype, device=self._device)
        self.slots = torch.empty(
            0, self.heads, self._stride, self.width, dtype=self.dtype, device=self._device
        )

    @property
    def size_bytes(self) -> int:
        return self._flat.numel() * self._flat.element_size()

    def set_stride(self, stride: int) -> None:
        """Divide the memory anew; contents are meaningless until written again."""
        self._stride = stride
        num_slots = self._capacity_tokens // stride
        used = self._flat[: num_slots * self.heads * stride]
        self.slots = used.view(num_slots, self.heads, stride, self.width)

    def zero(self) -> None:
        self._flat.zero_()

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write `values` `[n * heads, width]`, token-major, to `rows`.

        `rows` `[n * heads]` int64 comes from `SlotCache.flat_rows`.
        """
        self._flat.index_copy_(0, rows, values)

    def read(self, slot: int, start: int, end: int) -> torch.Tensor:
        """View `[heads, end - start, width]`."""
        return self.slots[slot, :, start:end]


class SlotCache:
    """Every SlotTensor of the engine under one division into slots. Used by the worker thread only."""

    def __init__(self, *, capacity_tokens: int, device: torch.device) -> None:
        self.capacity_tokens = capacity_tokens
        self.device = device
        self.stride = (
            round_up_tokens(capacity_tokens) if capacity_tokens % STRIDE_MULTIPLE == 0 else capacity_tokens
        )
        self.tensors: list[SlotTensor] = []
        self._settlers: list[Callable[[], None]] = []
        self.allocated = True
        self.zero_vacated = False
        """True while some slot may hold non-finite values: attention multiplies masked positions by 0, so
        what a request leaves behind would spoil the slot's next owner."""

    def add(self, heads: int, width: int, dtype: torch.dtype) -> SlotTensor:
        tensor = SlotTensor(
            capacity_tokens=self.capacity_tokens, heads=heads, width=width, dtype=dtype, device=self.device
        )
        tensor.set_stride(self.stride)
        self.tensors.append(tensor)
        return tensor

    def on_settle(self, settle: Callable[[], None]) -> None:
        """`settle` writes what its owner has kept back from the slots."""
        self._settlers.append(settle)

    def settle(self) -> None:
        """Have all written that belongs to the slots; before anything is read from them, moved or divided."""
        for settle in self._settlers:
            settle()

    @property
    def num_slots(self) -> int:
        return self.capacity_tokens // self.stride

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    def fits(self, num_slots: int, stride: int) -> bool:
        return num_slots * stride <= self.capacity_tokens

    def divide(self, stride: int, lengths: Sequence[int]) -> None:
        """Change the stride, keeping the first `lengths[i]` tokens of slot i."""
        assert self.fits(len(lengths), stride)
        assert max(lengths, default=0) <= stride
        self.settle()
        longest = max(lengths, default=0)
        for tensor in self.tensors:
            kept = tensor.slots[: len(lengths), :, :longest].clone() if longest else None
            tensor.set_stride(stride)
            if self.zero_vacated:
                tensor.zero()
            if kept is None:
                continue
            if self.zero_vacated:
                for slot, length in enumerate(lengths):
                    tensor.slots[slot, :, :length].copy_(kept[slot, :, :length])
            else:
                tensor.slots[: len(lengths), :, :longest].copy_(kept)
        self.stride = stride

    def guard_from_non_finite(self, lengths: Sequence[int]) -> None:
        """Zero all but the first `lengths[i]` tokens of slot i.

        Until `zero_vacated` is unset only those may be other than 0.
        """
        self.zero_vacated = True
        self.divide(self.stride, lengths)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot over another, which leaves the source vacated."""
        self.vacate(target)
        if length == 0:
            return
        for tensor in self.tensors:
            tensor.slots[target, :, :length].copy_(tensor.slots[source, :, :length])
        self.vacate(source)

    def vacate(self, slot: int) -> None:
        """Nobody owns the slot any more."""
        self.settle()
        if self.zero_vacated:
            for tensor in self.tensors:
                tensor.slots[slot].zero_()

    def release(self) -> None:
        self.settle()
        for tensor in self.tensors:
            tensor.release()
        self.allocated = False

    def allocate(self) -> None:
        self.allocated = True
        for tensor in self.tensors:
            tensor.allocate()

    def flat_rows(self, heads: int, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows of `SlotTensor.write` for tokens at `(slots[i], positions[i])`.

        `[n * heads]` int64, token-major.
        """
        first = slots * (heads * self.stride) + positions
        if heads == 1:
            return first
        steps = torch.arange(0, heads * self.stride, self.stride, device=first.device)
        return (first[:, None] + steps).reshape(-1)


def required_stride(reserved_tokens: Sequence[int]) -> int:
    """Stride in which the largest of these requests fits."""
    return round_up_tokens(max(reserved_tokens, default=1))


def tensor_bytes_per_token(tensors: Sequence[SlotTensor]) -> int:
    return sum(math.prod((tensor.heads, tensor.width)) * tensor.dtype.itemsize for tensor in tensors)
