"""`ForwardStep`: the tokens of one forward pass and where their results go."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from radix_rl.engines.embedded.kv_slots import SlotCache, SlotTensor

_active = threading.local()


@dataclass(kw_only=True)
class ForwardStep:
    """`num_slots` requests in neighbouring slots, S tokens each, padded on the left.

    Left padding puts every request's last token in the last column, so that one index selects all logits.
    """

    cache: SlotCache
    first_slot: int
    num_slots: int
    input_ids: torch.Tensor
    """`[num_slots, S]` int64."""
    positions: torch.Tensor
    """`[num_slots, S]` int64; 0 where padded."""
    key_length: int
    """Keys that attention sees: the longest request after this step."""
    real: torch.Tensor | None
    """`[n]` int64, indices of real tokens in the flattened `[num_slots * S]`; None: there is no padding."""
    write_slots: torch.Tensor
    """`[n]` int64, slot of each real token."""
    write_positions: torch.Tensor
    """`[n]` int64."""
    _rows: dict[int, torch.Tensor] = field(default_factory=dict)
    _masks: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def num_columns(self) -> int:
        return self.input_ids.shape[1]

    @property
    def num_tokens(self) -> int:
        """Padding included."""
        return self.input_ids.numel()

    def store(self, tensor: SlotTensor, values: torch.Tensor) -> None:
        """`values` `[num_slots * S, heads * width]` or a shape that reshapes to it; padding is left out."""
        flat = values.reshape(self.num_tokens, tensor.heads * tensor.width)
        if self.real is not None:
            flat = flat[self.real]
        rows = self._rows.get(tensor.heads)
        if rows is None:
            rows = self.cache.flat_rows(tensor.heads, self.write_slots, self.write_positions)
            self._rows[tensor.heads] = rows
        tensor.write(rows, flat.reshape(-1, tensor.width))

    def keys(self, tensor: SlotTensor) -> torch.Tensor:
        """View `[num_slots, heads, key_length, width]`."""
        return tensor.slots[self.first_slot : self.first_slot + self.num_slots, :, : self.key_length]

    def repeat_mask(self, mask: torch.Tensor, groups: int) -> torch.Tensor:
        """`[b, 1, S, L]` -> `[b, 1, groups * S, L]`; one row is left to broadcast."""
        if groups == 1 or mask.shape[2] == 1:
            return mask
        batch, _, columns, length = mask.shape

        def repeat() -> torch.Tensor:
            rows = mask.unsqueeze(2).expand(batch, 1, groups, columns, length)
            return rows.reshape(batch, 1, groups * columns, length)

        return self._once(mask, groups, repeat)

    def mask_of_heads(self, mask: torch.Tensor, heads: int) -> torch.Tensor:
        """`[b, 1, 1, L]` -> `[b * heads, 1, L]`."""
        return self._once(mask, heads, lambda: mask.expand(-1, heads, -1, -1).flatten(0, 1))

    def _once(self, mask: torch.Tensor, times: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `make` returns, made once a step for each mask and number of times."""
        key = (id(mask), times)
        cached = self._masks.get(key)
        if cached is None:
            # The mask is kept too: its id must not pass to another tensor while the entry lives.
            cached = self._masks[key] = (mask, make())
        return cached[1]


def active_step() -> ForwardStep | None:
    """The step whose forward pass runs on this thread."""
    return getattr(_active, "step", None)


@contextmanager
def running_step(step: ForwardStep) -> Iterator[None]:
    """Hooks and attention find the step here; cleared also when the forward pass raises."""
    _active.step = step
    try:
        yield
    finally:
        _active.step = None
