"""`ScriptedEngine`: an engine without a model, whose answers a script gives."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from radix_engine_plugins.collector import TokenOutputCollector
from radix_engine_plugins.writer import OutputStoreWriter
from radix_rl.buckets.bucket import WeightBucket
from radix_rl.engines.base import Engine, EngineCapabilities, EngineInfo, MemoryTag, PauseMode, check_outputs
from radix_rl.errors import EngineDeadError, EngineStateError, RequestError, WeightUpdateError
from radix_rl.types import FinishReason, GenerateOutput, GenerateRequest, PartialOutput, VersionSpan


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How the script wants one request answered, which has P prompt and gets C output tokens."""

    output_ids: Sequence[int]
    """Cut at the request's max_new_tokens, and after the first of its stop token ids."""
    logprobs: Sequence[float] | None = None
    """One an output token; None: -0.5 each."""
    routed_experts: np.ndarray | None = None
    """`[P + C - 1, layers, top_k]` int32; None: row t is 100 t + 0, 1, 2 ... over layers and places."""
    sampling_mask: Sequence[Sequence[int]] | None = None
    """Token ids that each output token was chosen of; None: itself alone."""
    versions: Sequence[str] | None = None
    """Weight version of each output token; None: the one in force when it is given."""
    finish_reason: FinishReason | None = None
    """None: by what ended it, a stop token id or the limit."""
    cached_tokens: int = 0
    delay_s: float = 0.0
    """Before the first token."""
    step_s: float = 0.0
    """Before every token."""
    error: Exception | None = None
    """Raised after `error_after` tokens."""
    error_after: int = 0


Script = Callable[[GenerateRequest], Answer]


@dataclass
class _Run:
    """A request that has not ended."""

    request: GenerateRequest
    answer: Answer
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    abort_message: str | None = None
    ids: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        spans: list[VersionSpan] = []
        for place, version in enumerate(self.versions):
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(spans[-1].start, place + 1, version)
            else:
                spans.append(VersionSpan(place, place + 1, version))
        return tuple(spans)

    @property
    def logprobs(self) -> tuple[float, ...]:
        given = self.answer.logprobs
        return (-0.5,) * len(self.ids) if given is None else tuple(given[: len(self.ids)])


class ScriptedEngine(Engine):
    """Keeps the engine contract, and answers by `script`. One event loop uses it.

    A script that raises fails its request so. `calls` has every control call as `(name, argument ...)`,
    `requests` every request; `failures` maps the name of a method to what it raises from now on, or to a list
    of which each call raises the next until none is left. Weights in force are in `weights`, by name, so that
    a script may answer by them; `staged` has those of an update that has begun, else None. `paused` and
    `asleep` say how the engine stands.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        writer: OutputStoreWriter | None = None,
        info: EngineInfo | None = None,
        **capabilities: Any,
    ) -> None:
        """`script`: by default every token is the one after its predecessor.

        The writer stays the caller's; `capabilities` replace fields of EngineCapabilities.
        """
        self.script = script or self.count_up
        self.writer = writer
        self.requests: list[GenerateRequest] = []
        self.calls: list[tuple[Any, ...]] = []
        self.failures: dict[str, BaseException | list[BaseException]] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.running: dict[str, _Run] = {}
        self.most_running = 0
        self._info = info or EngineInfo(
            model_path="/models/scripted",
            weight_version="0",
            context_length=1024,
            vocab_size=2000,
            num_layers=2,
            num_experts=64,
            experts_per_token=3,
        )
        self._capabilities = EngineCapabilities(
            **{
                "routed_experts": True,
                "indexer_topk": False,
                "sampling_mask": True,
                "output_store": None if writer is None else "memory",
                "pause_modes": ("abort", "retract", "in_place"),
                "sleep_tags": ("weights", "kv_cache"),
                "weight_transports": ("memory",),
            }
            | capabilities
        )
        self.staged: dict[str, torch.Tensor] | None = None
        self.asleep: set[MemoryTag] = set()
        self.paused = self._closed = False
        self._held = False
        self._goes = asyncio.Event()
        self._goes.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def count_up(self, request: GenerateRequest) -> Answer:
        """Each token is the one after its predecessor, modulo the vocabulary."""
        last = request.input_ids[-1]
        tokens = range(last + 1, last + 1 + request.sampling.max_new_tokens)
        return Answer(output_ids=[token % self._info.vocab_size for token in tokens])

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    @property
    def version(self) -> str:
        return self._info.weight_version

    def hold(self) -> None:
        """Let no token come any more, until `release`. Both may be called from any thread."""
        self._held = True
        self._goes.clear()

    def release(self) -> None:
        self._held = False
        if self._loop is None:
            self._settle()
        else:
            self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        """Tokens come while the engine is neither held nor paused."""
        if self._held or self.paused:
            self._goes.clear()
        else:
            self._goes.set()

    async def start(self) -> EngineInfo:
        self._called("start")
        return self._info

    async def info(self) -> EngineInfo:
        return self._info

    # Generation

    def check(self, request: GenerateRequest) -> None:
        check_outputs(request, self._capabilities)
        sampling = request.sampling
        if not 0 <= request.routed_experts_start_len <= len(request.input_ids):
            raise RequestError("routed_experts_start_len: expected at most the number of prompt tokens")
        if (
            not request.input_ids
            or len(request.input_ids) + sampling.max_new_tokens > self._info.context_length
        ):
            raise RequestError(
                f"input_ids: expected 1 to {self._info.context_length} tokens with the output's"
            )
        if not 0 < sampling.top_p <= 1 or sampling.temperature < 0:
            raise RequestError("sampling: expected 0 < top_p <= 1 and temperature >= 0")

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        async with contextlib.aclosing(self.stream(request)) as outputs:
            async for output in outputs:
                if isinstance(output, GenerateOutput):
                    return output
        raise AssertionError("a stream ends with its output")

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[PartialOutput | GenerateOutput, None]:
        self._loop = asyncio.get_running_loop()
        self.requests.append(request)
        self._check_state()
        self._fail_if_asked("generate")
        self.check(request)
        if request.request_id in self.running:
            raise RequestError(
                f"request_id {request.request_id!r} belongs to a running request; use a new one"
            )
        run = self.running[request.request_id] = _Run(request, self.script(request))
        self.most_running = max(self.most_running, len(self.running))
        try:
            async for partial in self._tokens(run):
                yield partial
            if self._closed:
                raise EngineDeadError("the engine was closed")
            yield await self._finish(run)
        finally:
            del self.running[request.request_id]

    async def _tokens(self, run: _Run) -> AsyncIterator[PartialOutput]:
        answer, sampling = run.answer, run.request.sampling
        if not await self._may_go_on(run, answer.delay_s):
            return
        for token in answer.output_ids[: sampling.max_new_tokens]:
            if not await self._may_go_on(run, answer.step_s):
                return
            self._fail_after(run)
            run.versions.append(answer.versions[len(run.ids)] if answer.versions else self.version)
            run.ids.append(token)
            yield PartialOutput(
                request_id=run.request.request_id,
                prompt_tokens=len(run.request.input_ids),
                output_ids=tuple(run.ids),
                output_logprobs=run.logprobs,
                version_spans=run.spans,
                cached_tokens=answer.cached_tokens,
            )
            if token in sampling.stop_token_ids:
                return
        self._fail_after(run)

    def _fail_after(self, run: _Run) -> None:
        if run.answer.error is not None and len(run.ids) >= run.answer.error_after:
            raise run.answer.error

    async def _may_go_on(self, run: _Run, wait_s: float) -> bool:
        """Wait so long, and while tokens are held; False when the request was ended meanwhile."""
        if wait_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(run.ended.wait(), wait_s)
        else:
            await asyncio.sleep(0)
        while not (run.ended.is_set() or self._goes.is_set()):
            waits = [asyncio.ensure_future(event.wait()) for event in (run.ended, self._goes)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return not run.ended.is_set()

    async def _finish(self, run: _Run) -> GenerateOutput:
        request, reason, stash, ref = run.request, self._reason(run), None, None
        # What is aborted before its first token has not been put through a model.
        collector = self._collector(run) if run.ids or reason.type != "abort" else None
        if collector is not None:
            stash = collector.to_stash(len(request.input_ids) + max(len(run.ids) - 1, 0))
            if request.return_outputs_via_store:
                assert self.writer is not None, "refused by check"
                ref, stash = await self.writer.write(stash, collector.start_rows()), None
        return GenerateOutput(
            request_id=request.request_id,
            prompt_tokens=len(request.input_ids),
            output_ids=tuple(run.ids),
            output_logprobs=run.logprobs,
            finish_reason=reason,
            version_spans=run.spans,
            weight_version=self.version,
            cached_tokens=run.answer.cached_tokens,
            outputs=stash,
            routed_experts_start=request.routed_experts_start_len,
            output_store_ref=ref,
        )

    def _reason(self, run: _Run) -> FinishReason:
        if run.ended.is_set():
            return FinishReason(type="abort", message=run.abort_message or "asked to")
        if run.answer.finish_reason is not None:
            return run.answer.finish_reason
        if run.ids and run.ids[-1] in run.request.sampling.stop_token_ids:
            return FinishReason(type="stop", matched=run.ids[-1])
        return FinishReason(type="length", length=len(run.ids))

    def _collector(self, run: _Run) -> TokenOutputCollector | None:
        """The replay outputs that the request asked for."""
        request, answer = run.request, run.answer
        if not (request.return_routed_experts or request.return_sampling_mask):
            return None
        layers, top_k = self._info.num_layers, self._info.experts_per_token or 1
        support = request.return_sampling_mask and request.sampling_logprobs_mode == "support"
        collector = TokenOutputCollector(
            routed_experts_shape=(layers, top_k) if request.return_routed_experts else None,
            sampling_mask=request.return_sampling_mask,
            sampling_mask_logprobs=support,
            start_row=request.routed_experts_start_len,
        )
        if request.return_routed_experts:
            num_rows = len(request.input_ids) + max(len(run.ids) - 1, 0)
            rows = answer.routed_experts
            collector.add_routed_experts(
                numbered_rows(num_rows, layers, top_k) if rows is None else rows[:num_rows]
            )
        if request.return_sampling_mask:
            masks = answer.sampling_mask or [[token] for token in run.ids]
            for mask in masks[: len(run.ids)]:
                logprobs = np.full(len(mask), -0.5, np.float32) if support else None
                collector.add_sampling_mask(np.array(mask, np.int32), logprobs)
        return collector

    # Control

    async def abort(self, request_id: str | None = None, message: str | None = None) -> None:
        self._called("abort", request_id)
        for name, run in self.running.items():
            if request_id in (None, name):
                run.abort_message = message
                run.ended.set()

    async def pause(self, mode: PauseMode = "in_place") -> None:
        self._called("pause", mode)
        self._check_can(mode, self._capabilities.pause_modes, "pause modes")
        if self.paused:
            raise EngineStateError("the engine is paused already; resume it first")
        self.paused = True
        self._settle()
        if mode == "abort":
            for run in self.running.values():
                run.ended.set()

    async def resume(self) -> None:
        self._called("resume")
        self.paused = False
        self._settle()

    async def sleep(self, tags: Collection[MemoryTag] = ("weights", "kv_cache")) -> None:
        self._called("sleep", tuple(tags))
        for tag in tags:
            self._check_can(tag, self._capabilities.sleep_tags, "memory tags")
        self.asleep.update(tags)
        if "weights" in tags:
            self.staged = None

    async def wake(self, tags: Collection[MemoryTag] = ("weights", "kv_cache")) -> None:
        """Weights that were dropped come with the next commit only."""
        self._called("wake", tuple(tags))
        self.asleep -= set(tags) - {"weights"}

    async def flush_cache(self) -> None:
        self._called("flush_cache")

    async def begin_weight_update(self, version: str) -> None:
        self._called("begin_weight_update", version)
        if self.staged is not None:
            raise EngineStateError("a weight update has begun already; commit or abort it first")
        self.staged = dict(self.weights)

    async def update_weights(self, bucket: WeightBucket) -> None:
        """A refused bucket, failed by a WeightUpdateError, ends the update."""
        try:
            self._called("update_weights", *(spec.name for spec in bucket.specs))
        except WeightUpdateError:
            self.staged = None
            raise
        self._open_update().update({name: tensor.clone() for name, tensor in bucket.tensors()})

    async def commit_weight_update(self, version: str) -> None:
        self._called("commit_weight_update", version)
        self.weights, self.staged = self._open_update(), None
        self.asleep.discard("weights")
        self._rename(version)

    async def abort_weight_update(self) -> None:
        self._called("abort_weight_update")
        self.staged = None

    async def set_weight_version(self, version: str) -> None:
        self._called("set_weight_version", version)
        self._rename(version)

    async def health(self) -> None:
        self._fail_if_asked("health")
        self._check_state()

    async def close(self) -> None:
        self._called("close")
        self._closed = True
        for run in self.running.values():
            run.ended.set()

    def _called(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        self._fail_if_asked(name)

    def _fail_if_asked(self, name: str) -> None:
        failure = self.failures.get(name)
        if isinstance(failure, list):
            failure = failure.pop(0) if failure else None
        if failure is not None:
            raise failure

    def _rename(self, version: str) -> None:
        self._info = msgspec.structs.replace(self._info, weight_version=version)

    def _open_update(self) -> dict[str, torch.Tensor]:
        if self.staged is None:
            raise WeightUpdateError("no weight update has begun; call begin_weight_update first")
        return self.staged

    def _check_can(self, asked: str, can: Collection[str], what: str) -> None:
        if asked not in can:
            raise EngineStateError(f"{what} of this engine: {', '.join(can) or 'none'}; got {asked!r}")

    def _check_state(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine was closed")
        if self.asleep:
            raise EngineStateError(f"asleep: {', '.join(sorted(self.asleep))}; wake it or send weights first")


def numbered_rows(num_rows: int, layers: int, top_k: int) -> np.ndarray:
    """`[num_rows, layers, top_k]` int32: row t holds 100 t + its place, so that a shifted row is seen."""
    rows = np.arange(num_rows, dtype=np.int32)[:, None, None] * 100
    return rows + np.arange(layers * top_k, dtype=np.int32).reshape(layers, top_k)
