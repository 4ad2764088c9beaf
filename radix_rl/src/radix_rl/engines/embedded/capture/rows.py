"""`RowCapture`: what a model's routers or indexers chose, stored beside keys and values."""

from dataclasses import dataclass

import numpy as np
import torch

from radix_rl.engines.embedded.cache.slots import SlotCache
from radix_rl.engines.embedded.step import ForwardStep, recorded_step
from radix_rl.routers.base import Record

_KEPT_ELEMENTS = 1 << 16
"""Steps are put into the slots together: one at a time costs a small model's step two percent."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A step's choices, not yet in the slots."""

    slots: torch.Tensor
    """`[tokens]`."""
    positions: torch.Tensor
    choices: dict[int, torch.Tensor]
    """By layer, `[..., k]` of the tokens in the model's order."""


class RowCapture:
    """One field's choices: `[tokens, layers, top_k]` of the latest steps, then rows of the slots.

    What `recorder` makes is called while the engine's forward pass runs. Calls in a step of which nobody
    wants the field, or outside of one, are ignored; so the same model may be used elsewhere.
    """

    def __init__(
        self, field: str, *, layers: int, top_k: int, largest_id: int, max_tokens: int, device: torch.device
    ) -> None:
        """`field` of TokenOutputStash; `max_tokens`: the most tokens of one forward pass."""
        self.field = field
        self.layers = layers
        self.top_k = top_k
        self._dtype = torch.int16 if largest_id <= np.iinfo(np.int16).max else torch.int32
        # Rows of a layer that does not choose.
        self._absent = torch.full((max_tokens, top_k), -1, dtype=self._dtype, device=device)
        self._choices: dict[int, torch.Tensor] = {}
        """Of the current step, by layer."""
        self._kept: list[_Kept] = []
        self._num_kept = 0

    def allocate(self, cache: SlotCache) -> None:
        self.slots = cache.add(1, self.layers * self.top_k, self._dtype)
        self._cache = cache
        cache.on_settle(self._settle)

    def recorder(self, layer: int) -> Record:
        """Make the function that records a layer's choices `[..., k]`.

        They are those of a step's tokens in the model's order; k may be below top_k, the rest is -1. They are
        kept for several steps, in which nobody may change them.
        """

        def record(choices: torch.Tensor) -> None:
            if recorded_step(self.field) is not None:
                self._choices[layer] = choices

        return record

    def store(self, step: ForwardStep) -> None:
        """Keep the step's rows with its tokens, if they are wanted."""
        if self.field not in step.recorded:
            return
        self._kept.append(_Kept(step.slots, step.positions, self._choices))
        self._choices = {}
        self._num_kept += step.num_tokens * self.layers * self.top_k
        if self._num_kept >= _KEPT_ELEMENTS:
            self._settle()

    def _settle(self) -> None:
        if not self._kept:
            return
        slots = torch.cat([kept.slots for kept in self._kept])
        positions = torch.cat([kept.positions.view(-1) for kept in self._kept])
        layers = [torch.cat([self._rows(kept, layer) for kept in self._kept]) for layer in range(self.layers)]
        rows = torch.cat(layers, dim=1).to(self._dtype)
        self.slots.write(self._cache.flat_rows(1, slots, positions), rows)
        self._kept.clear()
        self._num_kept = 0

    def _rows(self, kept: _Kept, layer: int) -> torch.Tensor:
        """A layer's choices in a step, `[tokens, top_k]`."""
        choices = kept.choices.get(layer)
        if choices is None:
            return self._absent[: len(kept.slots)]
        missing = self.top_k - choices.shape[-1]
        if missing:
            choices = torch.nn.functional.pad(choices, (0, missing), value=-1)
        return choices if choices.dim() == 2 else choices.flatten(0, -2)

    def read(self, slot: int, start: int, end: int) -> np.ndarray:
        """Copy of rows [start, end) of a slot: `[end - start, layers, top_k]` int32."""
        self._cache.settle()
        # `copy`: int32 rows would else be a view of the slot, which the next request overwrites.
        rows = self.slots.read(slot, start, end)[0].to(torch.int32, copy=True)
        return rows.cpu().numpy().reshape(end - start, self.layers, self.top_k)
