"""`EmbeddedEngine`: the engine that runs inside this process, on PyTorch and transformers."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection
from collections.abc import Sequence as Sequences
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedModel

from radix_engine_plugins.writer import OutputStoreWriter
from radix_rl.buckets.bucket import WeightBucket
from radix_rl.concurrency import to_end
from radix_rl.engines.base import Engine, EngineCapabilities, EngineInfo, MemoryTag, PauseMode
from radix_rl.engines.embedded.build import build_core, build_writer, describe_model
from radix_rl.engines.embedded.config import EmbeddedEngineSetup
from radix_rl.engines.embedded.core import EngineCore
from radix_rl.engines.embedded.inbox import Inbox, Outcomes
from radix_rl.engines.embedded.outbox import Outbox
from radix_rl.engines.embedded.outputs import build_output
from radix_rl.engines.embedded.sampling.uniform import row_keys
from radix_rl.engines.embedded.schedule.limits import RequestLimits
from radix_rl.engines.embedded.schedule.sequence import Sequence
from radix_rl.engines.embedded.stats import EngineStats
from radix_rl.engines.embedded.worker import Worker
from radix_rl.errors import ConfigurationError, EngineDeadError, EngineStateError
from radix_rl.openmp_pool import end_pool
from radix_rl.types import GenerateOutput, GenerateRequest, PartialOutput, VersionSpan

_T = TypeVar("_T")
_ALL_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")


class EmbeddedEngine(Engine):
    """Continuous batching over a preallocated cache, with captured replay outputs.

    They are captured from the model's own modules.

    The event loop only queues calls; one worker thread owns model, cache and scheduler. A model passed as an
    object belongs to the engine until `close`, which leaves its modules as they were; its parameters keep the
    weights, dtype and device that they have by then.
    """

    def __init__(
        self,
        config: EmbeddedEngineSetup,
        *,
        model: PreTrainedModel | None = None,
        tokenizer: Any | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        """Set by `start` where it is loaded from the model's folder; None: the model has none."""
        self._model = model
        self._worker: Worker | None = None
        self._writer: OutputStoreWriter | None = None
        self._limits: RequestLimits | None = None
        self._core: EngineCore | None = None
        self._inbox = Inbox(self._submit)
        self._outbox = Outbox()
        self._drawn_seeds = itertools.count()

    @property
    def capabilities(self) -> EngineCapabilities:
        store = self.config.output_store
        return EngineCapabilities(
            routed_experts=self.config.enable_return_routed_experts,
            indexer_topk=self.config.enable_return_indexer_topk,
            sampling_mask=True,
            output_store=None if store is None else store.backend,
            pause_modes=("abort", "retract", "in_place"),
            sleep_tags=_ALL_TAGS,
            weight_transports=("memory",),
            ordered_admission=True,
        )

    async def start(self) -> EngineInfo:
        if self._worker is not None:
            raise EngineStateError("the engine was started already")
        try:
            # The thread cannot be stopped; what it brings must not stay open.
            await to_end(self._connect_writer())
        except BaseException:
            await self.close()
            raise
        model, self._model = self._model, None
        self._worker = Worker(
            lambda: build_core(self.config, model, self.tokenizer), self.config.num_threads, self._outbox
        )
        # The caller may have built the model.
        end_pool()
        self._worker.start()
        try:
            core = await asyncio.wrap_future(self._worker.ready)
        except BaseException:
            await self.close()
            raise
        self.tokenizer = core.runner.loaded.tokenizer
        self._limits = RequestLimits(
            vocab_size=core.runner.vocab_size,
            context_length=core.runner.loaded.context_length,
            kv_cache_tokens=self.config.kv_cache_tokens,
            sampling_mask_max_tokens=self.config.sampling_mask_max_tokens,
            has_tokenizer=self.tokenizer is not None,
        )
        self._core = core
        # A tokenizer may know more ids than the model has rows; such an id is never sampled.
        vocab_size = core.runner.vocab_size
        self._end_token_ids = frozenset(i for i in core.runner.loaded.end_token_ids if i < vocab_size)
        return await self.info()

    async def _connect_writer(self) -> None:
        self._writer = await asyncio.to_thread(build_writer, self.config, self._model)

    def check(self, request: GenerateRequest) -> None:
        super().check(request)
        if self._limits is None:
            raise EngineStateError("the engine was not started")
        self._limits.check(request)

    async def info(self) -> EngineInfo:
        """Answers at once, also while a step runs."""
        return describe_model(self.config, self._core_now())

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        done: asyncio.Future[Sequence] = asyncio.get_running_loop().create_future()
        sequence = self._sequence(request, done, on_tokens=None)
        try:
            await self._inbox.put(sequence)
            finished = await done
        except asyncio.CancelledError:
            self._abort_in_background(sequence)
            raise
        return await self._answer(finished)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[PartialOutput | GenerateOutput]:
        """Partial outputs as tokens come, then the GenerateOutput as `generate` gives it.

        Closing the iterator aborts.

        The caller owns a stored object once the GenerateOutput was yielded.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Sequence] = loop.create_future()
        news = asyncio.Event()

        def on_tokens(_sequence: Sequence) -> None:
            self._outbox.add(loop, news.set)

        sequence = self._sequence(request, done, on_tokens)
        done.add_done_callback(lambda _: news.set())
        try:
            await self._inbox.put(sequence)
            shown = 0
            while True:
                await news.wait()
                news.clear()
                if done.done():
                    break
                partial = self._partial(sequence)
                if len(partial.output_ids) > shown:
                    shown = len(partial.output_ids)
                    yield partial
            yield await self._answer(done.result())
        finally:
            if not done.done():
                self._abort_in_background(sequence)

    def _partial(self, sequence: Sequence) -> PartialOutput:
        # The worker appends a token's id before its log-probability: what has the latter is complete.
        logprobs = tuple(sequence.output_logprobs)
        spans = tuple(sequence.version_spans)
        start = spans[-1].end if spans else 0
        if len(logprobs) > start:
            spans = (*spans, VersionSpan(start, len(logprobs), self._core_now().weights.version or ""))
        return PartialOutput(
            request_id=sequence.request.request_id,
            prompt_tokens=sequence.prompt_tokens,
            output_ids=tuple(sequence.output_ids[: len(logprobs)]),
            output_logprobs=logprobs,
            version_spans=spans,
            cached_tokens=sequence.cached_tokens,
            num_retractions=sequence.num_retractions,
        )

    def _sequence(
        self,
        request: GenerateRequest,
        done: "asyncio.Future[Sequence]",
        on_tokens: Callable[[Sequence], None] | None,
    ) -> Sequence:
        self.check(request)
        loop = asyncio.get_running_loop()

        def resolve(sequence: Sequence) -> None:
            if not done.done():
                done.set_result(sequence)

        def on_finish(sequence: Sequence) -> None:
            self._outbox.add(loop, partial(resolve, sequence))

        params = request.sampling
        stops = frozenset() if params.ignore_eos else self._end_token_ids | frozenset(params.stop_token_ids)
        seed = params.seed
        if seed is None:
            drawn = np.array([next(self._drawn_seeds)], dtype=np.uint64)
            seed = int(row_keys(np.array([self.config.seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64), drawn)[0])
        return Sequence(
            request=request, seed=seed, stop_token_ids=stops, on_finish=on_finish, on_tokens=on_tokens
        )

    def _submit(self, sequences: Sequences[Sequence]) -> "Future[Outcomes]":
        return self._running_worker().call(lambda core: core.submit_all(sequences))

    async def _answer(self, sequence: Sequence) -> GenerateOutput:
        if sequence.error is not None:
            raise sequence.error
        return await build_output(sequence, self._writer, self._core_now().weights.version)

    def _abort_in_background(self, sequence: Sequence) -> None:
        def abort(core: EngineCore) -> None:
            core.abort_sequence(sequence)

        try:
            self._running_worker().call(abort)
        except EngineDeadError:
            return

    async def abort(self, request_id: str | None = None, message: str | None = None) -> None:
        await self._call(lambda core: core.abort(request_id, message or "aborted"))

    async def pause(self, mode: PauseMode = "in_place") -> None:
        if mode not in self.capabilities.pause_modes:
            raise ConfigurationError(
                f"pause mode: expected one of {self.capabilities.pause_modes}, got {mode!r}"
            )
        await self._call(lambda core: core.pause(mode))

    async def resume(self) -> None:
        await self._call(lambda core: core.resume())

    async def sleep(self, tags: Collection[MemoryTag] = _ALL_TAGS) -> None:
        names = _checked_tags(tags)
        await self._call(lambda core: core.sleep(names))

    async def wake(self, tags: Collection[MemoryTag] = _ALL_TAGS) -> None:
        names = _checked_tags(tags)
        await self._call(lambda core: core.wake(names))

    async def flush_cache(self) -> None:
        await self._call(lambda core: core.scheduler.flush_prefixes())

    async def begin_weight_update(self, version: str) -> None:
        await self._call(lambda core: core.weights.begin(version))

    async def update_weights(self, bucket: WeightBucket) -> None:
        await self._call(lambda core: core.weights.update(bucket))

    async def commit_weight_update(self, version: str) -> None:
        await self._call(lambda core: core.commit_weights(version))

    async def abort_weight_update(self) -> None:
        await self._call(lambda core: core.weights.abort())

    async def set_weight_version(self, version: str) -> None:
        """Give the weights in force another version name, without new weights."""
        await self._call(lambda core: core.rename_weights(version))

    async def stats(self) -> EngineStats:
        return await self._call(lambda core: core.stats())

    async def health(self) -> None:
        await self._call(lambda core: core.check_health())

    async def close(self) -> None:
        worker, writer = self._worker, self._writer
        self._writer = None
        if worker is not None:
            worker.close()
            await asyncio.to_thread(worker.join)
        if writer is not None:
            await writer.close()

    @property
    def writer(self) -> OutputStoreWriter | None:
        """The store writer, for whoever must discard a reference that never reached its client."""
        return self._writer

    def _running_worker(self) -> Worker:
        if self._worker is None:
            raise EngineStateError("the engine was not started")
        return self._worker

    def _core_now(self) -> EngineCore:
        """For reading single attributes; everything else goes through the worker."""
        if self._core is None:
            raise EngineStateError("the engine was not started")
        return self._core

    async def _call(self, function: Callable[[EngineCore], _T]) -> _T:
        return await asyncio.wrap_future(self._running_worker().call(function))


def _checked_tags(tags: Collection[str]) -> tuple[str, ...]:
    unknown = sorted(set(tags) - set(_ALL_TAGS))
    if unknown:
        raise ConfigurationError(f"memory tags: expected some of {_ALL_TAGS}, got {unknown!r}")
    return tuple(tags)
