"""`ModelRunner`: runs the model over slots and hands out logits; owns the cache and the captures."""

import inspect
import logging
from collections.abc import Sequence as Rows

import numpy as np
import torch

from radix_rl.engines.embedded.capture import RowCapture
from radix_rl.engines.embedded.indexers import attach_indexers
from radix_rl.engines.embedded.kv_slots import SlotCache
from radix_rl.engines.embedded.model_loader import LoadedModel
from radix_rl.engines.embedded.routers.registry import find_routers
from radix_rl.engines.embedded.sequence import Sequence
from radix_rl.engines.embedded.step import ForwardStep, running_step
from radix_rl.engines.embedded.step_cache import ProbeCache, StepCache, allocate_layers
from radix_rl.errors import ConfigurationError

logger = logging.getLogger(__name__)


class ModelRunner:
    """Used by the worker thread only."""

    def __init__(self, loaded: LoadedModel, *, kv_cache_tokens: int, max_tokens_per_step: int) -> None:
        self.loaded = loaded
        self.model = loaded.model
        self.device = loaded.model.device
        self.vocab_size = loaded.model.get_output_embeddings().weight.shape[0]  # type: ignore
        self._max_tokens = max_tokens_per_step
        parameters = inspect.signature(type(loaded.model).forward).parameters
        self._keeps_last_logits = "logits_to_keep" in parameters
        self.cache = SlotCache(capacity_tokens=kv_cache_tokens, device=self.device)
        self.captures: dict[str, RowCapture] = {}
        """Field name of TokenOutputStash -> its capture."""
        self._layers = allocate_layers(self.cache, self._probe())
        self._slot_numbers = torch.arange(max_tokens_per_step, device=self.device)

    def _probe(self) -> ProbeCache:
        probe = ProbeCache()
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            self.model(input_ids=token, position_ids=token, past_key_values=probe, use_cache=True)
        if not probe.shapes:
            raise ConfigurationError(
                f"{type(self.model).__name__} does not use the key-value cache it is given"
            )
        return probe

    def capture_routed_experts(self, num_experts: int, top_k: int) -> None:
        """Hook every router of the target model. Raises ConfigurationError if there is none or one is
        unknown.
        """
        routers = find_routers(self.loaded.layers, num_experts)
        if not routers:
            raise ConfigurationError(
                f"enable_return_routed_experts: {type(self.model).__name__} has no layer that routes to "
                "experts"
            )
        capture = RowCapture(
            layers=len(self.loaded.layers),
            top_k=top_k,
            largest_id=num_experts,
            max_tokens=self._max_tokens,
            device=self.device,
        )
        capture.allocate(self.cache)
        self.captures["routed_experts"] = capture
        for layer, (adapter, module) in routers.items():
            adapter.attach(module, lambda choices, layer=layer: capture.record(layer, choices))

    def capture_indexer_topk(self, index_topk: int) -> None:
        """Hook every indexer. Raises ConfigurationError if there is none."""
        self.captures["indexer_topk"] = attach_indexers(
            self.loaded.layers, index_topk, self._max_tokens, self.cache, self.device
        )

    def prefill(self, sequences: Rows[Sequence], first_slot: int, lengths: Rows[int]) -> torch.Tensor:
        """Put the next `lengths[i]` tokens of `sequences[i]`, in slot `first_slot + i`, through the model.

        Returns logits of each one's last token, `[len(sequences), vocab]`.
        """
        columns = max(lengths)
        tokens = torch.zeros(len(sequences), columns, dtype=torch.int64)
        positions = torch.zeros_like(tokens)
        for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            start, end = sequence.computed, sequence.computed + length
            tokens[row, columns - length :] = torch.tensor(sequence.token_range(start, end))
            positions[row, columns - length :] = torch.arange(start, end)
        padded = min(lengths) < columns
        count = torch.tensor(lengths)
        row_of_token = torch.repeat_interleave(torch.arange(len(sequences)), count)
        real = None
        write_positions = positions.reshape(-1)
        if padded:
            column = torch.arange(columns)
            real = (column[None] >= columns - count[:, None]).reshape(-1).nonzero()[:, 0]
            write_positions = write_positions[real]
        logits = self._forward(
            ForwardStep(
                cache=self.cache,
                first_slot=first_slot,
                num_slots=len(sequences),
                input_ids=tokens.to(self.device),
                positions=positions.to(self.device),
                key_length=max(s.computed + n for s, n in zip(sequences, lengths, strict=True)),
                real=None if real is None else real.to(self.device),
                write_slots=(row_of_token + first_slot).to(self.device),
                write_positions=write_positions.to(self.device),
            )
        )
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.computed += length
        return logits

    def decode(self, sequences: Rows[Sequence]) -> torch.Tensor:
        """Put the last token of each sequence through; `sequences[i]` owns slot i. Returns `[len(sequences),
        vocab]`.
        """
        computed = [sequence.computed for sequence in sequences]
        # Through numpy, which reads a list several times faster than torch does.
        inputs = np.array([[sequence.last_token for sequence in sequences], computed], dtype=np.int64)
        tokens, positions = torch.from_numpy(inputs).to(self.device)
        logits = self._forward(
            ForwardStep(
                cache=self.cache,
                first_slot=0,
                num_slots=len(sequences),
                input_ids=tokens[:, None],
                positions=positions[:, None],
                key_length=max(computed) + 1,
                real=None,
                write_slots=self._slot_numbers[: len(sequences)],
                write_positions=positions,
            )
        )
        for sequence in sequences:
            sequence.computed += 1
        return logits

    def _forward(self, step: ForwardStep) -> torch.Tensor:
        assert step.num_tokens <= self._max_tokens
        kwargs = {"logits_to_keep": 1} if self._keeps_last_logits else {}
        with torch.inference_mode():
            with running_step(step):
                output = self.model(
                    input_ids=step.input_ids,
                    position_ids=step.positions,
                    past_key_values=StepCache(self._layers, step),
                    use_cache=True,
                    **kwargs,
                )
            for capture in self.captures.values():
                capture.store(step)
            return output.logits[:, -1]
