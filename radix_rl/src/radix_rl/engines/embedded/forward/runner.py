"""`ModelRunner`: runs the model over slots and hands out logits; owns the cache and the captures."""

import inspect
import logging
import math
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import torch

from radix_rl.engines.embedded.cache.slots import SlotCache, tensor_bytes_per_token
from radix_rl.engines.embedded.capture.indexers import attach_indexers
from radix_rl.engines.embedded.capture.rows import RowCapture
from radix_rl.engines.embedded.forward.model import LoadedModel, counts_positions_in_cache
from radix_rl.engines.embedded.forward.segments import CPU_WORTH_A_CUT_BYTES, cut_segments
from radix_rl.engines.embedded.forward.step_cache import (
    LayerTensors,
    ProbeCache,
    StepCache,
    allocate_layers,
)
from radix_rl.engines.embedded.schedule.sequence import Sequence, SequenceState
from radix_rl.engines.embedded.step import ForwardStep, running_step
from radix_rl.errors import ConfigurationError
from radix_rl.routers.find import find_routers

logger = logging.getLogger(__name__)


class ModelRunner:
    """Used by the worker thread only."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        kv_cache_tokens: int,
        max_tokens_per_step: int,
        keeps_all_rows: bool = False,
    ) -> None:
        """Prepare a loaded model for steps.

        `keeps_all_rows`: replay rows are captured of every request, also of those that ask for none, for
        requests that share a prefix with them.
        """
        self.loaded = loaded
        self.model = loaded.model
        self.device = loaded.model.device
        self.vocab_size = loaded.model.get_output_embeddings().weight.shape[0]  # type: ignore
        self._max_tokens = max_tokens_per_step
        self._keeps_all_rows = keeps_all_rows
        parameters = inspect.signature(type(loaded.model).forward).parameters
        self._keeps_last_logits = "logits_to_keep" in parameters
        self.cache = SlotCache(capacity_tokens=kv_cache_tokens, device=self.device)
        self.captures: dict[str, RowCapture] = {}
        """Field name of TokenOutputStash -> its capture."""
        self._probed = self._probe()
        self._layers = self.new_layers(self.cache)
        has_indexers = any(layer.indexer_key is not None for layer in self._layers.values())
        self.mixes_lengths = not has_indexers and not counts_positions_in_cache(loaded.text_config)
        """Whether a step may hold requests with unequal numbers of tokens, in one row: indexers want a row
        for each request.
        """
        self._slot_numbers = torch.arange(max_tokens_per_step, device=self.device)
        self._worth_a_cut = math.inf
        """Keys that must go unread for a segment more."""
        if self.mixes_lengths and self.device.type == "cpu":
            layer_bytes = tensor_bytes_per_token(self.cache.tensors) / len(self._layers)
            self._worth_a_cut = CPU_WORTH_A_CUT_BYTES / layer_bytes

    def _probe(self) -> ProbeCache:
        probe = ProbeCache()
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        try:
            with torch.inference_mode():
                self.model(input_ids=token, position_ids=token, past_key_values=probe, use_cache=True)
        except Exception as error:
            raise ConfigurationError(
                f"{type(self.model).__name__} does not run with the embedded engine's cache: {error}"
            ) from error
        if not probe.shapes:
            raise ConfigurationError(
                f"{type(self.model).__name__} does not use the key-value cache it is given"
            )
        return probe

    def new_layers(self, cache: SlotCache) -> dict[int, LayerTensors]:
        """Memory in `cache` for all that the model caches."""
        return allocate_layers(cache, self._probed)

    def capture_routed_experts(self, num_experts: int, top_k: int) -> None:
        """Hook every router of the target model.

        Raises ConfigurationError if there is none or one is unknown.
        """
        routers = find_routers(self.loaded.layers, num_experts)
        if not routers:
            raise ConfigurationError(
                f"enable_return_routed_experts: {type(self.model).__name__} has no layer that routes to "
                "experts"
            )
        capture = RowCapture(
            "routed_experts",
            layers=len(self.loaded.layers),
            top_k=top_k,
            largest_id=num_experts,
            max_tokens=self._max_tokens,
            device=self.device,
        )
        capture.allocate(self.cache)
        self.captures[capture.field] = capture
        for layer, (kind, module) in routers.items():
            kind.attach(self.loaded.layers[layer], module, capture.recorder(layer))

    def capture_indexer_topk(self, index_topk: int) -> None:
        """Hook every indexer. Raises ConfigurationError if there is none."""
        capture = attach_indexers(self.loaded.layers, index_topk, self._max_tokens, self.cache, self.device)
        self.captures[capture.field] = capture

    def forward(self, first_slot: int, sequences: Rows[Sequence], lengths: Rows[int]) -> torch.Tensor:
        """Put the next `lengths[i]` tokens of `sequences[i]` through the model.

        Sequence i is in slot `first_slot + i`; all lengths are equal unless `mixes_lengths`. The caller is in
        inference mode.

        Returns logits of each one's last token, `[len(sequences), vocab]`.
        """
        step = self._step(first_slot, sequences, lengths)
        assert step.num_tokens <= self._max_tokens
        # Of a row of several segments the tokens that end a request; of one segment the last column.
        last = torch.from_numpy(np.cumsum(lengths) - 1).to(self.device) if len(step.segments) > 1 else None
        kwargs = {"logits_to_keep": 1 if last is None else last} if self._keeps_last_logits else {}
        logits = self.run(step, self._layers, **kwargs)
        for capture in self.captures.values():
            capture.store(step)
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.computed += length
        if last is None:
            return logits[:, -1]
        return logits[0] if self._keeps_last_logits else logits[0, last]

    def run(self, step: ForwardStep, layers: dict[int, LayerTensors], **kwargs: Any) -> torch.Tensor:
        """One forward pass over the memory of `layers`.

        Returns logits `[b, S, vocab]`, or of the columns that `kwargs` choose.
        """
        with running_step(step):
            output = self.model(
                input_ids=step.input_ids,
                position_ids=step.positions,
                past_key_values=StepCache(layers, step),
                use_cache=True,
                **kwargs,
            )
        return output.logits

    def _step(self, first_slot: int, sequences: Rows[Sequence], lengths: Rows[int]) -> ForwardStep:
        tokens: list[int] = []
        positions: list[int] = []
        for sequence, length in zip(sequences, lengths, strict=True):
            start = sequence.computed
            if sequence.state is SequenceState.DECODE:
                tokens.append(sequence.output_ids[-1])
                positions.append(start)
            else:
                tokens += sequence.token_range(start, start + length)
                positions += range(start, start + length)
        computed = [sequence.computed for sequence in sequences]
        segments = cut_segments(first_slot, computed, lengths, self._worth_a_cut)
        shape = (1, -1) if len(segments) > 1 else (segments[0].num_slots, segments[0].columns)
        slots = self._slot_numbers[first_slot : first_slot + len(sequences)]
        if len(tokens) > len(sequences):
            slots = slots.repeat_interleave(torch.tensor(lengths, device=self.device))
        # Through numpy, which reads a list several times faster than torch does.
        inputs = torch.from_numpy(np.array([tokens, positions], dtype=np.int64)).to(self.device)
        return ForwardStep(
            cache=self.cache,
            segments=segments,
            input_ids=inputs[0].view(shape),
            positions=inputs[1].view(shape),
            slots=slots,
            recorded=self._recorded(sequences),
        )

    def _recorded(self, sequences: Rows[Sequence]) -> frozenset[str]:
        if self._keeps_all_rows:
            return frozenset(self.captures)
        return frozenset().union(*[sequence.wanted_rows for sequence in sequences])
