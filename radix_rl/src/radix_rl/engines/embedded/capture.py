"""`RowCapture`: what hooks on a model's routers or indexers saw, collected into one preallocated array a
step.
"""

import numpy as np
import torch

from radix_rl.engines.embedded.kv_slots import SlotCache
from radix_rl.engines.embedded.step import ForwardStep, active_step


class RowCapture:
    """One field's choices: `[tokens, layers, top_k]` of the current step, then rows of the slots.

    Hooks call `record` while the engine's forward pass runs; calls outside an engine step are ignored, so the
    same model may be used elsewhere.
    """

    def __init__(
        self, *, layers: int, top_k: int, largest_id: int, max_tokens: int, device: torch.device
    ) -> None:
        """`max_tokens`: the most tokens, padding included, of one forward pass."""
        self.layers = layers
        self.top_k = top_k
        dtype = torch.int16 if largest_id <= np.iinfo(np.int16).max else torch.int32
        # -1 stays where a layer does not choose.
        self._step_rows = torch.full((max_tokens, layers, top_k), -1, dtype=dtype, device=device)

    def allocate(self, cache: SlotCache) -> None:
        self.slots = cache.add(1, self.layers * self.top_k, self._step_rows.dtype)

    def record(self, layer: int, choices: torch.Tensor) -> None:
        """`choices` `[tokens, k]` (k may be below top_k: the rest is -1) of a step's tokens in the model's
        order.
        """
        if active_step() is None:
            return
        tokens, width = choices.shape
        target = self._step_rows[:tokens, layer]
        if width == self.top_k:
            target.copy_(choices)
        else:
            target[:, :width].copy_(choices)
            target[:, width:].fill_(-1)

    def store(self, step: ForwardStep) -> None:
        """Keep the step's rows with its tokens."""
        step.store(self.slots, self._step_rows[: step.num_tokens])

    def read(self, slot: int, start: int, end: int) -> np.ndarray:
        """Copy of rows [start, end) of a slot: `[end - start, layers, top_k]` int32."""
        # `copy`: int32 rows would else be a view of the slot, which the next request overwrites.
        rows = self.slots.read(slot, start, end)[0].to(torch.int32, copy=True)
        return rows.cpu().numpy().reshape(end - start, self.layers, self.top_k)
