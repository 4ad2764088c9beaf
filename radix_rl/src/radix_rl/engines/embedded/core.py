"""`EngineCore`: the engine's life on the worker thread: steps, pauses, weight versions, sleep and health.

Which requests a step runs is the scheduler's (`schedule/scheduler.py`).
"""

import math
from collections.abc import Sequence as Rows

import torch

from radix_rl.engines.base import PauseMode
from radix_rl.engines.embedded.cache.freed_memory import give_back, no_memory_is_told
from radix_rl.engines.embedded.forward.runner import ModelRunner
from radix_rl.engines.embedded.sampling.batch import SamplingBatch
from radix_rl.engines.embedded.sampling.sampler import Sampled, Sampler
from radix_rl.engines.embedded.schedule.finish import FinishCheck
from radix_rl.engines.embedded.schedule.scheduler import Scheduler
from radix_rl.engines.embedded.schedule.sequence import Sequence
from radix_rl.engines.embedded.shortcuts.float32 import Float32Products
from radix_rl.engines.embedded.shortcuts.undo import ModelChanges
from radix_rl.engines.embedded.stats import EngineStats
from radix_rl.engines.embedded.weights import WeightUpdater
from radix_rl.errors import EngineError, EngineStateError
from radix_rl.types import FinishReason


class EngineCore:
    """Used by the worker thread only."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        changes: ModelChanges,
        max_running_requests: int,
        chunked_prefill_tokens: int,
        weight_version: str,
        prefix_cache_tokens: int = 0,
        products: Float32Products | None = None,
    ) -> None:
        """`changes`: what was changed about the model, which `close` undoes."""
        self.runner = runner
        self.weights = WeightUpdater(runner.model, weight_version)
        self.scheduler = Scheduler(
            runner.cache,
            runner.captures,
            self.weights,
            mixes_lengths=runner.mixes_lengths,
            max_running_requests=max_running_requests,
            chunked_prefill_tokens=chunked_prefill_tokens,
            prefix_cache_tokens=prefix_cache_tokens,
        )
        self.sampler = Sampler()
        self.paused: PauseMode | None = None
        self._changes = changes
        self._products = products
        self._finish = FinishCheck(runner.loaded.tokenizer)
        self._sampling: SamplingBatch | None = None
        self._generated_tokens = 0
        self._prefilled_tokens = 0
        self._sampling_mask_ids = 0
        self._non_finite_seen = 0

    def submit(self, sequence: Sequence) -> None:
        """Queue a request, by order of arrival.

        Raises EngineStateError without weights or cache, RequestError for an id that is in use.
        """
        if self.weights.version is None:
            raise EngineStateError("the engine has no weights; commit a weight update before generating")
        if not self.runner.cache.allocated:
            raise EngineStateError("the key-value cache is asleep; wake(['kv_cache']) before generating")
        self.scheduler.submit(sequence)

    def submit_all(self, sequences: Rows[Sequence]) -> list[Exception | None]:
        """Queue requests in this order: for each None, or why it is refused."""
        outcomes: list[Exception | None] = []
        for sequence in sequences:
            try:
                self.submit(sequence)
            except Exception as error:
                outcomes.append(error)
            else:
                outcomes.append(None)
        return outcomes

    def abort(self, request_id: str | None = None, message: str = "aborted") -> None:
        """End one request, or all, with what they have. An unknown id is ignored."""
        self.scheduler.abort(request_id, message)
        self._drop_idle_batch()

    def abort_sequence(self, sequence: Sequence) -> None:
        """End this request, and no other that has taken its id since."""
        if self.scheduler.holds(sequence):
            self.abort(sequence.request.request_id)

    # Steps

    @property
    def can_step(self) -> bool:
        return (
            self.paused is None
            and self.weights.version is not None
            and self.runner.cache.allocated
            and bool(self.scheduler.waiting or self.scheduler.running)
        )

    @torch.inference_mode()
    def step(self) -> None:
        """Run one step: a token for every request that decodes, and the next prompts.

        In one forward pass where the model allows it.
        """
        scheduler = self.scheduler
        scheduler.admit()
        prompts, lengths = scheduler.prefill_group()
        if prompts and not self.runner.mixes_lengths:
            self._forward(scheduler.slots.num_decoding, prompts, lengths)
            prompts, lengths = [], []
        decoding = scheduler.slots.decoding
        if decoding or prompts:
            self._forward(0, decoding + prompts, [1] * len(decoding) + lengths)
        self._drop_idle_batch()

    def _drop_idle_batch(self) -> None:
        if not self.scheduler.running:
            # It would keep the last requests' answers.
            self._sampling = None

    def _forward(self, first_slot: int, sequences: list[Sequence], lengths: list[int]) -> None:
        """Requests in the slots from `first_slot` on: those that decode, then those that prefill."""
        logits = self.runner.forward(first_slot, sequences, lengths)
        num_decoding = self.scheduler.slots.num_decoding - first_slot
        self._prefilled_tokens += sum(lengths[num_decoding:])
        # Only the last can be unfinished: others would not have left room for it.
        done = list(range(len(sequences)))
        if sequences[-1].computed < sequences[-1].num_tokens:
            done.pop()
        # Prompts may end unsampled, so that no log-probability tells. Some models give tokens minus infinity.
        if num_decoding < len(sequences) and not bool((logits[num_decoding:] < math.inf).all()):
            self.scheduler.guard_from_non_finite()
        self.scheduler.prefilled([sequences[row] for row in done[num_decoding:]])
        # A request for no tokens only wants its prompt's rows.
        silent = [row for row in done if sequences[row].request.sampling.max_new_tokens == 0]
        rows = [row for row in done if row not in silent]
        if rows:
            batch = [sequences[row] for row in rows]
            if self._sampling is None or not self._sampling.matches(batch):
                self._sampling = SamplingBatch(batch, self.runner.vocab_size, self.runner.device)
            logits = logits if len(rows) == len(sequences) else logits[rows]
            self._accept(batch, self.sampler.sample(logits, self._sampling))
        self.scheduler.finish([(sequences[row], FinishReason(type="length", length=0)) for row in silent])

    def _accept(self, sequences: list[Sequence], sampled: Sampled) -> None:
        if self.sampler.num_non_finite > self._non_finite_seen:
            self._non_finite_seen = self.sampler.num_non_finite
            self.scheduler.guard_from_non_finite()
        finished: list[tuple[Sequence, FinishReason]] = []
        for row, (sequence, token, logprob) in enumerate(
            zip(sequences, sampled.tokens, sampled.logprobs, strict=True)
        ):
            sequence.output_ids.append(token)
            sequence.output_logprobs.append(logprob)
            if sequence.request.return_sampling_mask:
                self._sampling_mask_ids += len(sampled.supports[row].token_ids)
                sequence.mask_ids.append(sampled.supports[row].token_ids)
                sequence.mask_logprobs.append(sampled.supports[row].logprobs)
            reason = self._end_reason(sequence, token)
            if reason is not None:
                finished.append((sequence, reason))
            elif sequence.on_tokens is not None:
                sequence.on_tokens(sequence)
        self._generated_tokens += len(sequences)
        self.scheduler.finish(finished)

    def _end_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        try:
            return self._finish.after_token(sequence, token)
        except Exception as error:
            # A tokenizer that cannot decode this answer fails its request and no other.
            sequence.error = EngineError(f"stop strings: the tokenizer cannot decode the answer: {error!r}")
            return FinishReason(type="abort", message=str(sequence.error))

    # Pauses, weights, memory

    def pause(self, mode: PauseMode) -> None:
        if self.paused is not None:
            raise EngineStateError(f"the engine is paused already ({self.paused}); resume it first")
        self.paused = mode
        if mode == "abort":
            self.abort(message="the engine was paused")
        elif mode == "retract":
            self.scheduler.retract_all()

    def resume(self) -> None:
        self.paused = None

    def commit_weights(self, version: str) -> None:
        """Put the staged weights in force.

        Running requests must be paused; in_place they keep their cache and go on under the new version.
        """
        self.weights.check_complete(version)
        if self.scheduler.running and self.paused is None:
            raise EngineStateError(
                f"{len(self.scheduler.running)} requests are running; pause the engine before a weight "
                "update is committed"
            )
        old = self.weights.version
        for sequence in self.scheduler.requests:
            if old is not None:
                sequence.close_span(old)
            sequence.cache_version = None
        self.weights.commit(version)
        if self._products is not None:
            self._products.refresh()
        self.scheduler.flush_prefixes()
        if old is None:
            # After a sleep the cache takes its memory next: what staging freed must not lie beside it.
            give_back(self.runner.device)

    def rename_weights(self, version: str) -> None:
        """Give the weights in force another version name."""
        if self.weights.version is None:
            raise EngineStateError("the engine has no weights to name")
        for sequence in self.scheduler.requests:
            sequence.close_span(self.weights.version)
        self.weights.version = version

    def check_health(self) -> None:
        """Raises EngineStateError while it cannot generate."""
        if self.weights.version is None:
            raise EngineStateError("the engine has no weights; commit a weight update")
        if not self.runner.cache.allocated:
            raise EngineStateError("the key-value cache is asleep; wake(['kv_cache'])")

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_cache_tokens=self.runner.cache.capacity_tokens,
            kv_cache_tokens_used=sum(sequence.computed for sequence in self.scheduler.running),
            prefix_cache_tokens_used=0
            if self.scheduler.prefixes is None
            else self.scheduler.prefixes.used_tokens,
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            sampling_mask_ids=self._sampling_mask_ids,
            non_finite_logprobs=self.sampler.num_non_finite,
            paused=self.paused,
            weight_version=self.weights.version,
        )

    def sleep(self, tags: Rows[str]) -> None:
        if self.scheduler.running and not (self.paused == "in_place" and "kv_cache" not in tags):
            raise EngineStateError(
                f"{len(self.scheduler.running)} requests hold the cache; pause with abort or retract before "
                "sleep, or pause in_place and let only the weights sleep"
            )
        if "weights" in tags:
            if self.weights.version is not None:
                for sequence in self.scheduler.requests:
                    sequence.close_span(self.weights.version)
            self.weights.sleep()
            if self._products is not None:
                self._products.release()
        if "kv_cache" in tags and self.runner.cache.allocated:
            self.runner.cache.release()
            if self.scheduler.prefixes is not None:
                self.scheduler.prefixes.release()
        give_back(self.runner.device)

    def wake(self, tags: Rows[str]) -> None:
        """Take the memory again. EngineStateError where there is none: what slept goes on sleeping."""
        if "weights" in tags:
            with no_memory_is_told("the weights"):
                self.weights.wake()
        if "kv_cache" in tags and not self.runner.cache.allocated:
            if not self.weights.awake:
                raise EngineStateError("the weights are asleep; wake them before the cache takes its memory")
            try:
                with no_memory_is_told("the key-value cache"):
                    self.runner.cache.allocate()
                    if self.scheduler.prefixes is not None:
                        self.scheduler.prefixes.allocate()
            except EngineStateError:
                self.sleep(["kv_cache"])
                raise

    def close(self, reason: Exception) -> None:
        """Fail what waits and runs with `reason`, and leave the model's modules as they were."""
        self.scheduler.fail_all(reason)
        self._changes.undo()
