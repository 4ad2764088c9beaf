"""`StepCache`: what a transformers model sees as its key-value cache during one step."""

from typing import Any

import torch
from transformers.cache_utils import Cache

from radix_rl.engines.embedded.cache.slots import SlotCache, SlotTensor
from radix_rl.engines.embedded.step import ForwardStep


class LayerTensors:
    """Slot tensors of one layer, found by the probe."""

    def __init__(self) -> None:
        self.key: SlotTensor | None = None
        self.value: SlotTensor | None = None
        self.indexer_key: SlotTensor | None = None


class StepCache(Cache):
    """Writes a step's keys and values into the slots and returns all that the step's requests have there."""

    is_compileable = False  # type: ignore[assignment]  # a property in the base class

    def __init__(self, layers: dict[int, LayerTensors], step: ForwardStep) -> None:
        super().__init__(layers=[])
        self._tensors = layers
        self._step = step

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a step's keys and values, and give the slots' views of all.

        `key_states` and `value_states` `[b, heads, S, width]`; returns views `[slots, heads, key_length,
        width]`, see `ForwardStep.keys`.
        """
        layer = self._tensors[layer_idx]
        assert layer.key is not None
        assert layer.value is not None
        step = self._step
        step.store(layer.key, key_states.transpose(1, 2))
        step.store(layer.value, value_states.transpose(1, 2))
        return step.keys(layer.key), step.keys(layer.value)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """`[b, S, width]` -> `[b, key_length, width]`."""
        tensor = self._tensors[layer_idx].indexer_key
        assert tensor is not None
        self._step.store(tensor, indexer_key_states)
        return self._step.keys(tensor)[:, 0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        # Positions and masks come from the step; a row of several requests has no length of its own.
        return max(self._step.key_length - self._step.num_columns, 0)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._step.key_length, 0

    @property
    def is_sliding(self) -> list[bool]:  # type: ignore[override]
        """No layer drops keys: windows are applied by the mask."""
        return [False] * (max(self._tensors, default=0) + 1)


class ProbeCache(Cache):
    """Records what each layer caches for one token, so that the slots can be allocated."""

    is_compileable = False  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, dict[str, tuple[int, int, torch.dtype]]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for name, states in (("key", key_states), ("value", value_states)):
            self.shapes.setdefault(layer_idx, {})[name] = (states.shape[1], states.shape[3], states.dtype)
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        shape = (1, indexer_key_states.shape[2], indexer_key_states.dtype)
        self.shapes.setdefault(layer_idx, {})["indexer_key"] = shape
        return indexer_key_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    @property
    def is_sliding(self) -> list[bool]:  # type: ignore[override]
        return [False]


def allocate_layers(cache: SlotCache, probe: ProbeCache) -> dict[int, LayerTensors]:
    """Slot tensors for everything that the probe saw."""
    layers: dict[int, LayerTensors] = {}
    for layer_idx, shapes in probe.shapes.items():
        layer = layers[layer_idx] = LayerTensors()
        for name, (heads, width, dtype) in shapes.items():
            setattr(layer, name, cache.add(heads, width, dtype))
    return layers
