"""`ServerState`: what the routes of one server share."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from radix_engine_plugins.writer import OutputStoreWriter
from radix_rl.engines.base import Engine
from radix_rl.errors import ConfigurationError, RequestError
from radix_rl.server.metrics import ServerMetrics
from radix_rl.server.settings import ServerSettings
from radix_rl.server.side_process import SideProcesses
from radix_rl.types import FinishReason

T = TypeVar("T")

_SHORT_BODY_BYTES = 32 * 1024
"""Parsed and tokenized within milliseconds, less than it takes others to notice."""
_SIDE_PROCESSES = 2


class CallQueue:
    """Which of one call's requests were aborted before the engine knew them."""

    def __init__(self) -> None:
        self._aborted: dict[str | None, str | None] = {}
        """Messages by the ids that were named; None: everything."""

    def abort(self, rid: str | None, message: str | None) -> None:
        """Abort the request of this id, or those whose ids go on with an underscore; None: all."""
        self._aborted[rid] = message

    def reason(self, request_id: str) -> FinishReason | None:
        """Why the request has ended already; None: it has not."""
        if not self._aborted:
            return None
        heads = (request_id[:place] for place, letter in enumerate(request_id) if letter == "_")
        for name in (None, request_id, *heads):
            if name in self._aborted:
                return FinishReason(type="abort", message=self._aborted[name] or "aborted")
        return None


class ServerState:
    """One event loop uses it. The engine and the writer belong to whoever made them."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        settings: ServerSettings,
        writer: OutputStoreWriter | None,
    ) -> None:
        if (engine.capabilities.output_store is not None) != (writer is not None):
            raise ConfigurationError(
                f"the engine's output store is {engine.capabilities.output_store!r}, the server's writer is "
                f"{writer!r}; give both or neither: the server deletes what the engine stored and no client "
                "received"
            )
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.writer = writer
        self.metrics = ServerMetrics(CollectorRegistry())
        self.running: set[str] = set()
        """Ids of engine requests that clients wait for."""
        self._queues: set[CallQueue] = set()
        self._side_processes = SideProcesses(_SIDE_PROCESSES, tokenizer, settings.parse_timeout_s)

    async def parse(self, function: Callable[..., T], data: bytes, *, apart: bool = False) -> T:
        """Run `function(tokenizer, data, info)`, which makes a call of a body.

        In a side process if the body is long or `apart`.
        """
        info = await self.engine.info()
        if apart or len(data) > _SHORT_BODY_BYTES:
            return await self._side_processes.run(function, data, info)
        return function(lambda: self.tokenizer, data, info)

    @contextmanager
    def queue(self) -> Iterator["CallQueue"]:
        """Around the life of one call, so that an abort reaches what the engine does not know yet."""
        queue = CallQueue()
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    async def abort(self, rid: str | None = None, message: str | None = None) -> None:
        """End the requests of one client's `rid`, or all, with the engine or on their way to it.

        An id that is not running is ignored: it may have just finished.
        """
        for queue in self._queues:
            queue.abort(rid, message)
        # What was handed over in this turn of the event loop reaches the engine at its end.
        await asyncio.sleep(0)
        if rid is None:
            await self.engine.abort(message=message)
            return
        for request_id in self.running_ids(rid):
            await self.engine.abort(request_id, message)

    @contextmanager
    def registered(self, request_id: str) -> Iterator[None]:
        """Makes the id known to `/abort_request`. RequestError if a request of that id runs already."""
        if request_id in self.running:
            raise RequestError(f"rid: {request_id!r} is running already; ids of running requests must differ")
        self.running.add(request_id)
        try:
            yield
        finally:
            self.running.remove(request_id)

    def running_ids(self, rid: str) -> list[str]:
        """Engine requests of one client's `rid`: the id itself, or those of its batch or samples."""
        return [name for name in self.running if name == rid or name.startswith(f"{rid}_")]

    def close(self) -> None:
        """End what the server started. Idempotent."""
        self._side_processes.close()


def state_of(request: Request) -> ServerState:
    return request.app.state.server
