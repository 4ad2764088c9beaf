"""`ForwardStep`: the tokens of one forward pass and where their results go."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from radix_rl.engines.embedded.cache.slots import SlotCache, SlotTensor

_T = TypeVar("_T")
_active = threading.local()
_MAX_MASKS = 16
"""Kept in a step, in the forms that attention wants."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Requests in neighbouring slots that put the same number of tokens through."""

    first_slot: int
    num_slots: int
    columns: int
    """Tokens of each request."""
    key_length: int
    """Keys that its attention sees: those of its longest request after the step."""

    @property
    def num_tokens(self) -> int:
        return self.num_slots * self.columns


@dataclass(kw_only=True)
class ForwardStep:
    """T tokens of requests in neighbouring slots, segment after segment, request after request.

    The model gets one segment as `[num_slots, columns]`, several as one row `[1, T]`; `[b, S]` below.
    """

    cache: SlotCache
    segments: Sequence[Segment]
    input_ids: torch.Tensor
    """`[b, S]` int64."""
    positions: torch.Tensor
    """`[b, S]` int64."""
    slots: torch.Tensor
    """`[T]` int64, each token's."""
    recorded: frozenset[str] = frozenset()
    """Fields of TokenOutputStash whose rows somebody wants of these tokens."""
    key_length: int = field(init=False)
    """The longest of the segments'."""
    _rows: dict[int, torch.Tensor] = field(default_factory=dict)
    _masks: dict[tuple[Any, ...], tuple[torch.Tensor, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.key_length = max(segment.key_length for segment in self.segments)

    @property
    def num_columns(self) -> int:
        return self.input_ids.shape[1]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    def store(self, tensor: SlotTensor, values: torch.Tensor) -> None:
        """`values` `[T, heads * width]` or a shape that reshapes to it."""
        rows = self._rows.get(tensor.heads)
        if rows is None:
            rows = self.cache.flat_rows(tensor.heads, self.slots, self.positions.reshape(-1))
            self._rows[tensor.heads] = rows
        tensor.write(rows, values.reshape(-1, tensor.width))

    def keys(self, tensor: SlotTensor) -> torch.Tensor:
        """View `[slots, heads, key_length, width]` of the segment's slots.

        Of all slots if there are several segments.
        """
        if len(self.segments) > 1:
            return tensor.slots[:, :, : self.key_length]
        (segment,) = self.segments
        first = segment.first_slot
        return tensor.slots[first : first + segment.num_slots, :, : self.key_length]

    def segment_masks(self, mask: torch.Tensor) -> list[torch.Tensor]:
        """`[1, 1, T, key_length]` -> of each segment `[num_slots, 1, columns, its key_length]`."""

        def split() -> list[torch.Tensor]:
            parts = mask[0, 0].split([segment.num_tokens for segment in self.segments])
            return [
                part.view(segment.num_slots, 1, segment.columns, -1)[..., : segment.key_length]
                for segment, part in zip(self.segments, parts, strict=True)
            ]

        return self._once(mask, ("segments",), split)

    def repeat_mask(self, mask: torch.Tensor, groups: int) -> torch.Tensor:
        """`[b, 1, S, L]` -> `[b, 1, groups * S, L]`; one row is left to broadcast."""
        if groups == 1 or mask.shape[2] == 1:
            return mask
        batch, _, columns, length = mask.shape

        def repeat() -> torch.Tensor:
            rows = mask.unsqueeze(2).expand(batch, 1, groups, columns, length)
            return rows.reshape(batch, 1, groups * columns, length)

        return self._once(mask, ("rows", groups), repeat)

    def mask_of_dtype(self, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._once(mask, ("dtype", dtype), lambda: mask.to(dtype))

    def mask_of_heads(self, mask: torch.Tensor, heads: int) -> torch.Tensor:
        """`[b, 1, 1, L]` -> `[b * heads, 1, L]`."""
        return self._once(mask, ("heads", heads), lambda: mask.expand(-1, heads, -1, -1).flatten(0, 1))

    def _once(self, mask: torch.Tensor, purpose: tuple[Any, ...], make: Callable[[], _T]) -> _T:
        """What `make` returns, made once a step for each mask and purpose."""
        key = (id(mask), *purpose)
        cached = self._masks.get(key)
        if cached is None:
            # A model that makes masks of its own in every layer must not fill the memory with them.
            if len(self._masks) == _MAX_MASKS:
                del self._masks[next(iter(self._masks))]
            # The mask is kept too: its id must not pass to another tensor while the entry lives.
            cached = self._masks[key] = (mask, make())
        return cached[1]


def active_step() -> ForwardStep | None:
    """The step whose forward pass runs on this thread."""
    return getattr(_active, "step", None)


def recorded_step(field: str) -> ForwardStep | None:
    """The same, if the field's rows are wanted of it."""
    step = active_step()
    return step if step is not None and field in step.recorded else None


@contextmanager
def running_step(step: ForwardStep) -> Iterator[None]:
    """Hooks and attention find the step here; cleared also when the forward pass raises."""
    _active.step = step
    try:
        yield
    finally:
        _active.step = None
