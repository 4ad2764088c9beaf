"""`Scheduler`: which requests run, in which slots, and how much of each goes into the next step.

A request waits, is admitted to a slot, prefills its prompt in one or several chunks, decodes, and ends. While
the engine is paused it may be retracted: it gives its slot back and waits again, with what it has sampled.
"""

from collections import deque
from collections.abc import Collection, Mapping

import numpy as np

from radix_rl.engines.embedded.cache.prefixes import PrefixCache
from radix_rl.engines.embedded.cache.slots import SlotCache
from radix_rl.engines.embedded.capture.rows import RowCapture
from radix_rl.engines.embedded.schedule.sequence import Sequence, SequenceState
from radix_rl.engines.embedded.schedule.shared_prefixes import SharedPrefixes
from radix_rl.engines.embedded.schedule.slot_table import SlotTable
from radix_rl.engines.embedded.weights import WeightUpdater
from radix_rl.errors import RequestError
from radix_rl.types import FinishReason


class Scheduler:
    """Used by the worker thread only."""

    def __init__(
        self,
        cache: SlotCache,
        captures: Mapping[str, RowCapture],
        weights: WeightUpdater,
        *,
        mixes_lengths: bool,
        max_running_requests: int,
        chunked_prefill_tokens: int,
        prefix_cache_tokens: int = 0,
    ) -> None:
        """Start with an empty queue and empty slots.

        `captures` by field of TokenOutputStash; `mixes_lengths`: whether a step may hold requests with
        unequal numbers of tokens.
        """
        self.slots = SlotTable(cache, max_running_requests)
        self.waiting: deque[Sequence] = deque()
        self.prefixes = PrefixCache(cache, prefix_cache_tokens) if prefix_cache_tokens else None
        self._cache = cache
        self._captures = captures
        self._mixes_lengths = mixes_lengths
        self._weights = weights
        self._chunk_tokens = chunked_prefill_tokens
        self._by_id: dict[str, Sequence] = {}

    @property
    def requests(self) -> Collection[Sequence]:
        """Every request that has not ended, waiting or running."""
        return self._by_id.values()

    @property
    def running(self) -> list[Sequence]:
        return self.slots.running

    # Queue

    def submit(self, sequence: Sequence) -> None:
        """Queue a request, by order of arrival. Raises RequestError for an id that is in use."""
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
        self.finish([(s, reason) for s in self.running if id(s) in targets])

    def holds(self, sequence: Sequence) -> bool:
        """Whether this request has not ended; another one may have its id since."""
        return self._by_id.get(sequence.request.request_id) is sequence

    def fail_all(self, error: Exception) -> None:
        """End every request with `error`, after a step that raised: no slot can be trusted any more."""
        for sequence in list(self.requests):
            sequence.error = error
            sequence.on_finish(sequence)
        self._by_id.clear()
        self.waiting.clear()

    # Admission

    def admit(self) -> None:
        """Fill free slots in order of arrival.

        With a prefix cache, a request whose prompt is being prefilled for another one steps aside until that
        is cached; those behind it may go first meanwhile.
        """
        self._clear_non_finite()
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
            self._start(sequence, slot=len(self.running) - 1)
        self.waiting.extendleft(reversed(aside))

    def _start(self, sequence: Sequence, slot: int) -> None:
        sequence.computed = 0
        sequence.cache_version = self._weights.version
        if self.prefixes is None:
            return
        # At least one token must go through the model, or there are no logits to sample from.
        places = self.prefixes.match(sequence.token_range(0, sequence.num_tokens - 1))
        if len(places):
            self.prefixes.load(places, slot)
            sequence.computed = len(places)
            if not sequence.output_ids:
                sequence.cached_tokens = len(places)

    # Prefill

    def prefill_group(self) -> tuple[list[Sequence], list[int]]:
        """The oldest prefilling requests whose prompts fit one step, and how many tokens of each go into it.

        A prompt longer than a step is cut into chunks, and is alone among those that prefill.
        """
        group: list[Sequence] = []
        lengths: list[int] = []
        for sequence in self.slots.prefilling:
            left = sequence.num_tokens - sequence.computed
            if group and (
                sum(lengths) + left > self._chunk_tokens or (left != lengths[0] and not self._mixes_lengths)
            ):
                break
            group.append(sequence)
            lengths.append(min(left, self._chunk_tokens))
        return group, lengths

    def prefilled(self, sequences: list[Sequence]) -> None:
        """These, the oldest that prefill, have their whole prompts in their slots and decode from now on."""
        for slot, sequence in enumerate(sequences, start=self.slots.num_decoding):
            self._keep_prefix(sequence, slot)
        self.slots.prefill_done(len(sequences))

    # Ends and retraction

    def finish(self, ends: list[tuple[Sequence, FinishReason]]) -> None:
        """End running requests and free their slots."""
        reasons = {id(sequence): reason for sequence, reason in ends}
        if not reasons:
            return
        for slot in range(len(self.running) - 1, -1, -1):
            sequence = self.running[slot]
            reason = reasons.get(id(sequence))
            if reason is not None:
                self._keep_prefix(sequence, slot)
                self._end(sequence, reason, slot)
                self.slots.remove(slot)

    def _end(self, sequence: Sequence, reason: FinishReason, slot: int | None) -> None:
        if self._weights.version is not None:
            sequence.close_span(self._weights.version)
        sequence.rows = self._rows(sequence, slot)
        sequence.finish_reason = reason
        sequence.state = SequenceState.FINISHED
        del self._by_id[sequence.request.request_id]
        sequence.on_finish(sequence)

    def retract_all(self) -> None:
        """Put running requests back to the head of the queue, in order of their slots.

        What they sampled stays, their slots are freed.
        """
        for slot in range(len(self.running) - 1, -1, -1):
            sequence = self.running[slot]
            sequence.saved_rows = self._rows(sequence, slot)
            self.slots.remove(slot)
            sequence.computed = 0
            sequence.num_retractions += 1
            sequence.state = SequenceState.WAITING
            self.waiting.appendleft(sequence)

    def _rows(self, sequence: Sequence, slot: int | None) -> dict[str, np.ndarray]:
        """Rows of every field that the request wants: saved ones first, the slot's after them.

        Copied out of the slot, which the next request may overwrite at once.
        """
        rows: dict[str, np.ndarray] = {}
        for field, capture in self._captures.items():
            if field not in sequence.wanted_rows:
                continue
            saved = sequence.saved_rows.get(field)
            start = sequence.request.routed_experts_start_len + (0 if saved is None else len(saved))
            if slot is not None and sequence.computed > start:
                fresh = capture.read(slot, start, sequence.computed)
                rows[field] = fresh if saved is None else np.concatenate((saved, fresh))
            else:
                rows[field] = (
                    saved if saved is not None else np.empty((0, capture.layers, capture.top_k), np.int32)
                )
        return rows

    # Prefixes, and what must not spread

    def flush_prefixes(self) -> None:
        """Forget cached prefixes."""
        if self.prefixes is not None:
            self.prefixes.clear()

    def _keep_prefix(self, sequence: Sequence, slot: int) -> None:
        """Offer a slot's keys and values to later requests.

        Not if two weight versions computed them, nor if they may not be finite.
        """
        if self.prefixes is None or self._cache.zero_vacated:
            return
        if sequence.cache_version == self._weights.version is not None:
            self.prefixes.insert(sequence.token_range(0, sequence.computed), slot)

    def guard_from_non_finite(self) -> None:
        """Some running request has keys or values that are not finite; see `SlotCache.zero_vacated`."""
        if not self._cache.zero_vacated:
            self._cache.guard_from_non_finite([s.computed for s in self.running])

    def _clear_non_finite(self) -> None:
        """Nobody runs any more whose keys or values are not finite; see `SlotCache.zero_vacated`."""
        if not self.running and self._cache.zero_vacated:
            self.flush_prefixes()
            self._cache.zero_vacated = False
