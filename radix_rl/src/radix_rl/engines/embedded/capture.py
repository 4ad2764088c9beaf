"""`RowCapture`: what hooks on a model's routers or indexers saw in a step, stored beside keys and values."""

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
        self._dtype = torch.int16 if largest_id <= np.iinfo(np.int16).max else torch.int32
        # Rows of a layer that does not choose.
        self._absent = torch.full((max_tokens, top_k), -1, dtype=self._dtype, device=device)
        self._choices: dict[int, torch.Tensor] = {}

    def allocate(self, cache: SlotCache) -> None:
        self.slots = cache.add(1, self.layers * self.top_k, self._dtype)

    def record(self, layer: int, choices: torch.Tensor) -> None:
        """`choices` `[tokens, k]` (k may be below top_k: the rest is -1) of a step's tokens in the model's
        order. Kept until the step is stored, so nobody may change them.
        """
        if active_step() is None:
            return
        missing = self.top_k - choices.shape[1]
        self._choices[layer] = (
            torch.nn.functional.pad(choices, (0, missing), value=-1) if missing else choices
        )

    def store(self, step: ForwardStep) -> None:
        """Keep the step's rows with its tokens."""
        absent = self._absent[: step.num_tokens]
        # All layers at once: copying each as its hook sees it costs a step more than the model can spare.
        rows = torch.stack([self._choices.get(layer, absent) for layer in range(self.layers)], dim=1)
        self._choices.clear()
        step.store(self.slots, rows.to(self._dtype))

    def read(self, slot: int, start: int, end: int) -> np.ndarray:
        """Copy of rows [start, end) of a slot: `[end - start, layers, top_k]` int32."""
        # `copy`: int32 rows would else be a view of the slot, which the next request overwrites.
        rows = self.slots.read(slot, start, end)[0].to(torch.int32, copy=True)
        return rows.cpu().numpy().reshape(end - start, self.layers, self.top_k)
