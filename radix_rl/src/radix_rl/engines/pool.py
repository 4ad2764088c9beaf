"""`EnginePool`: several engines as one: least loaded first, sessions kept together, dead ones left out."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

from radix_rl.buckets.bucket import WeightBucket
from radix_rl.concurrency import cancel_and_wait
from radix_rl.engines.base import Engine, EngineCapabilities, EngineInfo, MemoryTag, PauseMode
from radix_rl.engines.fleet import on_all, outcomes_of
from radix_rl.errors import EngineDeadError, EngineError
from radix_rl.types import GenerateOutput, GenerateRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SESSIONS = 65536
"""Sessions whose engine a pool remembers; one that is forgotten starts anew on the least loaded."""


def _common(lists: Sequence[tuple[T, ...]]) -> tuple[T, ...]:
    """Items that are in all of them."""
    return tuple(item for item in lists[0] if all(item in other for other in lists))


class EnginePool(Engine):
    """Owns its engines: `start` and `close` reach all of them.

    An engine that raises EngineDeadError gets no more requests until its health check succeeds; what it was
    working on is asked of another one, and the dead one's objects are its own to free. Control calls go to
    every engine, dead ones too: a fleet that is not whole is an error there.
    """

    def __init__(self, engines: Sequence[Engine], *, revive_after_s: float = 10.0) -> None:
        """`revive_after_s`: pause between health checks of a dead engine."""
        if not engines:
            raise ValueError("engines: expected at least one")
        self.engines = tuple(engines)
        self._revive_after_s = revive_after_s
        self._load = [0] * len(engines)
        self._alive = [True] * len(engines)
        self._home: OrderedDict[str, int] = OrderedDict()
        """Session -> engine that holds its cached prefix; the least recently used is forgotten first."""
        self._revivals: set[asyncio.Task[None]] = set()

    @property
    def capabilities(self) -> EngineCapabilities:
        """What every engine can do. Raises EngineError for engines that write to different stores."""
        each = [engine.capabilities for engine in self.engines]
        stores = {can.output_store for can in each}
        if len(stores) > 1:
            raise EngineError(
                f"the engines write to different output stores: {sorted(map(str, stores))}; use one"
            )

        return EngineCapabilities(
            routed_experts=all(can.routed_experts for can in each),
            indexer_topk=all(can.indexer_topk for can in each),
            sampling_mask=all(can.sampling_mask for can in each),
            output_store=stores.pop(),
            pause_modes=_common([can.pause_modes for can in each]),
            sleep_tags=_common([can.sleep_tags for can in each]),
            weight_transports=_common([can.weight_transports for can in each]),
            weight_names=each[0].weight_names,
            ordered_admission=all(can.ordered_admission for can in each),
        )

    def check(self, request: GenerateRequest) -> None:
        """Any of the engines may get the request, so that all must be able to answer it."""
        for engine in self.engines:
            engine.check(request)

    async def start(self) -> EngineInfo:
        """Start all at once. Raises EngineError if they do not serve the same model."""
        infos = await asyncio.gather(*(engine.start() for engine in self.engines))
        self._check_alike(infos)
        return infos[0]

    async def info(self) -> EngineInfo:
        infos = await asyncio.gather(*(engine.info() for engine in self.engines))
        self._check_alike(infos)
        return infos[0]

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        """Each engine is tried once at most. Raises EngineDeadError when none is left."""
        tried: set[int] = set()
        while True:
            index = self._choose(request.session_id, tried)
            tried.add(index)
            self._load[index] += 1
            try:
                return await self.engines[index].generate(request)
            except EngineDeadError as error:
                self._mark_dead(index)
                logger.warning("engine %d is dead, its request goes elsewhere: %s", index, error)
                if not self._candidates(tried):
                    raise EngineDeadError(
                        f"request {request.request_id}: no engine of {len(self.engines)} is left: {error}"
                    ) from error
            finally:
                self._load[index] -= 1

    async def abort(self, request_id: str | None = None, message: str | None = None) -> None:
        await self._on_all(lambda engine: engine.abort(request_id, message))

    async def pause(self, mode: PauseMode = "in_place") -> None:
        await self._on_all(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        await self._on_all(lambda engine: engine.resume())

    async def sleep(self, tags: Collection[MemoryTag] = ("weights", "kv_cache")) -> None:
        await self._on_all(lambda engine: engine.sleep(tags))

    async def wake(self, tags: Collection[MemoryTag] = ("weights", "kv_cache")) -> None:
        await self._on_all(lambda engine: engine.wake(tags))

    async def flush_cache(self) -> None:
        await self._on_all(lambda engine: engine.flush_cache())

    async def begin_weight_update(self, version: str) -> None:
        await self._on_all(lambda engine: engine.begin_weight_update(version))

    async def update_weights(self, bucket: WeightBucket) -> None:
        await self._on_all(lambda engine: engine.update_weights(bucket))

    async def commit_weight_update(self, version: str) -> None:
        await self._on_all(lambda engine: engine.commit_weight_update(version))

    async def abort_weight_update(self) -> None:
        await self._on_all(lambda engine: engine.abort_weight_update())

    async def set_weight_version(self, version: str) -> None:
        await self._on_all(lambda engine: engine.set_weight_version(version))

    async def health(self) -> None:
        """Healthy while one engine is."""
        errors = await outcomes_of(self.engines, lambda engine: engine.health())
        if errors[0] is not None and all(error is not None for error in errors):
            raise errors[0]

    async def close(self) -> None:
        await cancel_and_wait(self._revivals)
        await self._on_all(lambda engine: engine.close())

    def _choose(self, session_id: str | None, tried: Collection[int]) -> int:
        candidates = self._candidates(tried)
        if not candidates:
            raise EngineDeadError(f"no engine of {len(self.engines)} is alive")
        if session_id is None:
            return self._least_loaded(candidates)
        home = self._home.get(session_id)
        if home not in candidates:
            home = self._least_loaded(candidates)
        self._home[session_id] = home
        self._home.move_to_end(session_id)
        if len(self._home) > MAX_SESSIONS:
            self._home.popitem(last=False)
        return home

    def _least_loaded(self, candidates: Sequence[int]) -> int:
        return min(candidates, key=lambda candidate: self._load[candidate])

    def _candidates(self, tried: Collection[int]) -> list[int]:
        return [index for index, alive in enumerate(self._alive) if alive and index not in tried]

    def _mark_dead(self, index: int) -> None:
        if self._alive[index]:
            self._alive[index] = False
            task = asyncio.create_task(self._revive(index))
            self._revivals.add(task)
            task.add_done_callback(self._revivals.discard)

    async def _revive(self, index: int) -> None:
        while not self._alive[index]:
            await asyncio.sleep(self._revive_after_s)
            try:
                await self.engines[index].health()
                self._alive[index] = True
            except EngineError as error:
                logger.info("engine %d is still dead: %s", index, error)

    async def _on_all(self, call: Callable[[Engine], Awaitable[object]]) -> None:
        await on_all(self.engines, call)

    def _check_alike(self, infos: Sequence[EngineInfo]) -> None:
        for index, info in enumerate(infos):
            same = (info.vocab_size, info.num_layers, info.num_experts, info.experts_per_token)
            first = (
                infos[0].vocab_size,
                infos[0].num_layers,
                infos[0].num_experts,
                infos[0].experts_per_token,
            )
            if same != first:
                raise EngineError(
                    f"engine {index} serves another model than engine 0: {info!r}, expected {infos[0]!r}"
                )
