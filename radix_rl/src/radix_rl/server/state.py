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

T = TypeVar("T")

_SHORT_BODY_BYTES = 32 * 1024
"""Parsed and tokenized within milliseconds, less than it takes others to notice."""
_SIDE_PROCESSES = 2


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
        self._starting: set[asyncio.Future[None]] = set()
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
    def starting(self) -> Iterator[None]:
        """Around the time in which the requests of one call are started, see `all_started`."""
        started = asyncio.get_running_loop().create_future()
        self._starting.add(started)
        try:
            yield
        finally:
            self._starting.discard(started)
            started.set_result(None)

    async def all_started(self) -> None:
        """Returns when the engine knows every request of the calls that are being started now.

        An abort that came before would miss those of a large call that are still to come.
        """
        if self._starting:
            await asyncio.wait(self._starting)

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
