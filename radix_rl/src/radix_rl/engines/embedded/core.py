"""`EngineCore`: the scheduler. One `step` admits, prefills and decodes; everything here runs on the worker
thread.
"""

import logging
import math
from collections import deque
from collections.abc import Sequence as Rows

import numpy as np
import torch

from radix_rl.engines.base import PauseMode
from radix_rl.engines.embedded.cache.freed_memory import give_back
from radix_rl.engines.embedded.cache.prefixes import PrefixCache
from radix_rl.engines.embedded.forward.runner import ModelRunner
from radix_rl.engines.embedded.sampling.batch import SamplingBatch
from radix_rl.engines.embedded.sampling.sampler import Sampled, Sampler
from radix_rl.engines.embedded.schedule.finish import FinishCheck
from radix_rl.engines.embedded.schedule.sequence import Sequence, SequenceState
from radix_rl.engines.embedded.schedule.shared_prefixes import SharedPrefixes
from radix_rl.engines.embedded.schedule.slot_table import SlotTable
from radix_rl.engines.embedded.shortcuts.float32 import Float32Products
from radix_rl.engines.embedded.stats import EngineStats
from radix_rl.engines.embedded.weights import WeightUpdater
from radix_rl.errors import EngineError, EngineStateError, RequestError
from radix_rl.types import FinishReason

logger = logging.getLogger(__name__)


class EngineCore:
    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_running_requests: int,
        chunked_prefill_tokens: int,
        weight_version: str,
        prefix_cache_tokens: int = 0,
        products: Float32Products | None = None,
    ) -> None:
        self.runner = runner
        self.weights = WeightUpdater(runner.model, weight_version)
        self._products = products
        self.sampler = Sampler()
        self.paused: PauseMode | None = None
        self.waiting: deque[Sequence] = deque()
        self.slots = SlotTable(runner.cache, max_running_requests)
        self.prefixes = PrefixCache(runner.cache, prefix_cache_tokens) if prefix_cache_tokens else None
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self._finish = FinishCheck(runner.loaded.tokenizer)
        self._chunk_tokens = chunked_prefill_tokens
        self._by_id: dict[str, Sequence] = {}
        self._sampling: SamplingBatch | None = None
        self._non_finite_seen = 0

    # Requests

    def submit(self, sequence: Sequence) -> None:
        """Queue a request, by order of arrival. Raises EngineStateError without weights or cache."""
        if self.weights.version is None:
            raise EngineStateError("the engine has no weights; commit a weight update before generating")
        if not self.runner.cache.allocated:
            raise EngineStateError("the key-value cache is asleep; wake(['kv_cache']) before generating")
        if sequence.request.request_id in self._by_id:
            raise RequestError(
                f"request_id {sequence.request.request_id!r} belongs to a running request; use a new one"
            )
        self._by_id[sequence.request.request_id] = sequence
        self.waiting.append(sequence)

    def abort(self, request_id: str | None = None, message: str = "aborted") -> None:
        """End one request, or all, with what they have. An unknown id is ignored."""
        ids = list(self._by_id) if request_id is None else [request_id]
        targets = {id(self._by_id[i]) for i in ids if i in self._by_id}
        reason = FinishReason(type="abort", message=message)
        for sequence in list(self.waiting):
            if id(sequence) in targets:
                self.waiting.remove(sequence)
                self._end(sequence, reason, None)
        self._finish_slots([(s, reason) for s in self.slots.running if id(s) in targets])

    def abort_sequence(self, sequence: Sequence) -> None:
        """End this request, and no other that has taken its id since."""
        if self._by_id.get(sequence.request.request_id) is sequence:
            self.abort(sequence.request.request_id)

    def fail_all(self, error: Exception) -> None:
        """After a step that raised: nothing here can be trusted any more."""
        for sequence in list(self._by_id.values()):
            sequence.error = error
            sequence.on_finish(sequence)
        self._by_id.clear()
        self.waiting.clear()

    # State

    def pause(self, mode: PauseMode) -> None:
        if self.paused is not None:
            raise EngineStateError(f"the engine is paused already ({self.paused}); resume it first")
        self.paused = mode
        if mode == "abort":
            self.abort(message="the engine was paused")
        elif mode == "retract":
            for slot in range(len(self.slots.running) - 1, -1, -1):
                self._retract(slot)

    def resume(self) -> None:
        self.paused = None

    def commit_weights(self, version: str) -> None:
        """Requests that are running must be paused; in_place they keep their cache and go on under the new
        version.
        """
        self.weights.check_complete(version)
        if self.slots.running and self.paused is None:
            raise EngineStateError(
                f"{len(self.slots.running)} requests are running; pause the engine before a weight update is "
                "committed"
            )
        old = self.weights.version
        for sequence in self._by_id.values():
            if old is not None:
                sequence.close_span(old)
            sequence.cache_version = None
        self.weights.commit(version)
        if self._products is not None:
            self._products.refresh()
        self.flush_prefixes()

    def rename_weights(self, version: str) -> None:
        """Give the weights in force another version name."""
        if self.weights.version is None:
            raise EngineStateError("the engine has no weights to name")
        for sequence in self._by_id.values():
            sequence.close_span(self.weights.version)
        self.weights.version = version

    def flush_prefixes(self) -> None:
        """Forget cached prefixes."""
        if self.prefixes is not None:
            self.prefixes.clear()

    def check_health(self) -> None:
        """Raises EngineStateError while it cannot generate."""
        if self.weights.version is None:
            raise EngineStateError("the engine has no weights; commit a weight update")
        if not self.runner.cache.allocated:
            raise EngineStateError("the key-value cache is asleep; wake(['kv_cache'])")

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.slots.running),
            num_waiting=len(self.waiting),
            kv_cache_tokens=self.runner.cache.capacity_tokens,
            kv_cache_tokens_used=sum(sequence.computed for sequence in self.slots.running),
            prefix_cache_tokens_used=0 if self.prefixes is None else self.prefixes.used_tokens,
            generated_tokens=self.generated_tokens,
            prefilled_tokens=self.prefilled_tokens,
            non_finite_logprobs=self.sampler.num_non_finite,
            paused=self.paused,
            weight_version=self.weights.version,
        )

    def sleep(self, tags: Rows[str]) -> None:
        if self.slots.running and not (self.paused == "in_place" and "kv_cache" not in tags):
            raise EngineStateError(
                f"{len(self.slots.running)} requests hold the cache; pause with abort or retract before "
                "sleep, or pause "
                "in_place and let only the weights sleep"
            )
        if "weights" in tags:
            if self.weights.version is not None:
                for sequence in self._by_id.values():
                    sequence.close_span(self.weights.version)
            self.weights.sleep()
            if self._products is not None:
                self._products.release()
        if "kv_cache" in tags and self.runner.cache.allocated:
            self.runner.cache.release()
            if self.prefixes is not None:
                self.prefixes.release()
        give_back(self.runner.device)

    def wake(self, tags: Rows[str]) -> None:
        if "weights" in tags:
            self.weights.wake()
        if "kv_cache" in tags and not self.runner.cache.allocated:
            if not self.weights.awake:
                raise EngineStateError("the weights are asleep; wake them before the cache takes its memory")
            self.runner.cache.allocate()
            if self.prefixes is not None:
                self.prefixes.allocate()

    # Steps

    @property
    def can_step(self) -> bool:
        return (
            self.paused is None
            and self.weights.version is not None
            and self.runner.cache.allocated
            and bool(self.waiting or self.slots.running)
        )

    @torch.inference_mode()
    def step(self) -> None:
        """One token for every request that decodes, and the next prompts, in one forward pass where the model
        allows it.
        """
        self._clear_non_finite()
        self._admit()
        prompts, lengths = self._prefill_group()
        if prompts and not self.runner.mixes_lengths:
            self._forward(self.slots.num_decoding, prompts, lengths)
            prompts, lengths = [], []
        decoding = self.slots.decoding
        if decoding or prompts:
            self._forward(0, decoding + prompts, [1] * len(decoding) + lengths)

    def _admit(self) -> None:
        """Fill free slots in order of arrival.

        With a prefix cache, a request whose prompt is being prefilled for another one steps aside until that
        is cached; those behind it may go first meanwhile.
        """
        prefilling = SharedPrefixes(self.slots.prefilling)
        aside: list[Sequence] = []
        while self.waiting:
            sequence = self.waiting[0]
            if self.prefixes is not None:
                if prefilling.computes(sequence):
                    aside.append(self.waiting.popleft())
                    continue
                prefilling.add(sequence)
            if not self.slots.try_add(sequence):
                break
            self.waiting.popleft()
            self._start(sequence, slot=len(self.slots.running) - 1)
        self.waiting.extendleft(reversed(aside))

    def _start(self, sequence: Sequence, slot: int) -> None:
        sequence.computed = 0
        sequence.cache_version = self.weights.version
        if self.prefixes is None:
            return
        # At least one token must go through the model, or there are no logits to sample from.
        places = self.prefixes.match(sequence.token_range(0, sequence.num_tokens - 1))
        if len(places):
            self.prefixes.load(places, slot)
            sequence.computed = len(places)
            if not sequence.output_ids:
                sequence.cached_tokens = len(places)

    def _keep_prefix(self, sequence: Sequence, slot: int) -> None:
        """Offer what a slot holds to later requests; never what two weight versions computed, nor what may
        not be finite.
        """
        if self.prefixes is None or self.runner.cache.zero_vacated:
            return
        if sequence.cache_version == self.weights.version is not None:
            self.prefixes.insert(sequence.token_range(0, sequence.computed), slot)

    def _clear_non_finite(self) -> None:
        """Nobody runs any more whose keys or values are not finite; see `SlotCache.zero_vacated`."""
        if not self.slots.running and self.runner.cache.zero_vacated:
            self.flush_prefixes()
            self.runner.cache.zero_vacated = False

    def _guard_from_non_finite(self) -> None:
        """Some running request has keys or values that are not finite; see `SlotCache.zero_vacated`."""
        if not self.runner.cache.zero_vacated:
            self.runner.cache.guard_from_non_finite([s.computed for s in self.slots.running])

    def _prefill_group(self) -> tuple[list[Sequence], list[int]]:
        """The oldest prefilling requests whose prompts, or what is left of them, fit one step, and how much
        of each. A prompt that fits none is alone in its steps.
        """
        group: list[Sequence] = []
        lengths: list[int] = []
        for sequence in self.slots.prefilling:
            left = sequence.num_tokens - sequence.computed
            if group and (
                sum(lengths) + left > self._chunk_tokens
                or (left != lengths[0] and not self.runner.mixes_lengths)
            ):
                break
            group.append(sequence)
            lengths.append(min(left, self._chunk_tokens))
        return group, lengths

    def _forward(self, first_slot: int, sequences: list[Sequence], lengths: list[int]) -> None:
        """Requests in the slots from `first_slot` on: those that decode, then those that prefill."""
        logits = self.runner.forward(first_slot, sequences, lengths)
        num_decoding = self.slots.num_decoding - first_slot
        self.prefilled_tokens += sum(lengths[num_decoding:])
        # Only the last can be unfinished: others would not have left room for it.
        done = list(range(len(sequences)))
        if sequences[-1].computed < sequences[-1].num_tokens:
            done.pop()
        # Prompts may end unsampled, so that no log-probability tells. Some models give tokens minus infinity.
        if num_decoding < len(sequences) and not bool((logits[num_decoding:] < math.inf).all()):
            self._guard_from_non_finite()
        for row in done[num_decoding:]:
            self._keep_prefix(sequences[row], first_slot + row)
        self.slots.prefill_done(len(done) - num_decoding)
        # A request for no tokens only wants its prompt's rows.
        silent = [row for row in done if sequences[row].request.sampling.max_new_tokens == 0]
        rows = [row for row in done if row not in silent]
        if rows:
            batch = [sequences[row] for row in rows]
            if self._sampling is None or not self._sampling.matches(batch):
                self._sampling = SamplingBatch(batch, self.runner.vocab_size, self.runner.device)
            logits = logits if len(rows) == len(sequences) else logits[rows]
            self._accept(batch, self.sampler.sample(logits, self._sampling))
        self._finish_slots([(sequences[row], FinishReason(type="length", length=0)) for row in silent])

    def _accept(self, sequences: list[Sequence], sampled: Sampled) -> None:
        if self.sampler.num_non_finite > self._non_finite_seen:
            self._non_finite_seen = self.sampler.num_non_finite
            self._guard_from_non_finite()
        finished: list[tuple[Sequence, FinishReason]] = []
        for row, (sequence, token, logprob) in enumerate(
            zip(sequences, sampled.tokens, sampled.logprobs, strict=True)
        ):
            sequence.output_ids.append(token)
            sequence.output_logprobs.append(logprob)
            if sequence.request.return_sampling_mask:
                sequence.mask_ids.append(sampled.supports[row].token_ids)
                sequence.mask_logprobs.append(sampled.supports[row].logprobs)
            reason = self._end_reason(sequence, token)
            if reason is not None:
                finished.append((sequence, reason))
            elif sequence.on_tokens is not None:
                sequence.on_tokens(sequence)
        self.generated_tokens += len(sequences)
        self._finish_slots(finished)

    # Ends

    def _end_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        try:
            return self._finish.after_token(sequence, token)
        except Exception as error:
            # A tokenizer that cannot decode this answer fails its request and no other.
            sequence.error = EngineError(f"stop strings: the tokenizer cannot decode the answer: {error!r}")
            return FinishReason(type="abort", message=str(sequence.error))

    def _finish_slots(self, ends: list[tuple[Sequence, FinishReason]]) -> None:
        reasons = {id(sequence): reason for sequence, reason in ends}
        if not reasons:
            return
        for slot in range(len(self.slots.running) - 1, -1, -1):
            sequence = self.slots.running[slot]
            reason = reasons.get(id(sequence))
            if reason is not None:
                self._keep_prefix(sequence, slot)
                self._end(sequence, reason, slot)
                self.slots.remove(slot)
        if not self.slots.running:
            # It would keep the last requests' answers.
            self._sampling = None

    def _end(self, sequence: Sequence, reason: FinishReason, slot: int | None) -> None:
        if self.weights.version is not None:
            sequence.close_span(self.weights.version)
        sequence.rows = self._rows(sequence, slot)
        sequence.finish_reason = reason
        sequence.state = SequenceState.FINISHED
        del self._by_id[sequence.request.request_id]
        sequence.on_finish(sequence)

    def _retract(self, slot: int) -> None:
        """Back to the head of the queue; what was sampled stays, its cache goes."""
        sequence = self.slots.running[slot]
        sequence.saved_rows = self._rows(sequence, slot)
        self.slots.remove(slot)
        sequence.computed = 0
        sequence.num_retractions += 1
        sequence.state = SequenceState.WAITING
        self.waiting.appendleft(sequence)

    def _rows(self, sequence: Sequence, slot: int | None) -> dict[str, np.ndarray]:
        """Rows of every field that the request wants: saved ones first, the slot's after them."""
        rows: dict[str, np.ndarray] = {}
        for field, capture in self.runner.captures.items():
            if field not in sequence.wanted_rows:
                continue
            saved = sequence.saved_rows.get(field)
            start = 0 if saved is None else len(saved)
            if slot is not None and sequence.computed > start:
                fresh = capture.read(slot, start, sequence.computed)
                rows[field] = fresh if saved is None else np.concatenate((saved, fresh))
            else:
                rows[field] = (
                    saved if saved is not None else np.empty((0, capture.layers, capture.top_k), np.int32)
                )
        return rows
