"""Running the application on a socket until a signal, and an orderly end."""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from radix_rl.addresses import bind_tcp, host_and_port
from radix_rl.errors import ConfigurationError
from radix_rl.server.connections import (
    ACCEPTED_AT_ONCE,
    Connection,
    ConnectionLimits,
    OneLine,
    connections_that_fit,
    quiet_when_out_of_files,
)
from radix_rl.server.http import UNBOUNDED_PATHS
from radix_rl.server.settings import ServerSettings
from radix_rl.server.state import ServerState

logger = logging.getLogger(__name__)

_CANCEL_WAIT_S = 10.0
_BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """Stops on `stop`, or on SIGINT and SIGTERM while `serve` runs with `handle_signals`.

    uvicorn's own way raises the signal again when it is done, which would end the process before the engine
    and the store are closed; here the signals only stop the serving.
    """

    def __init__(self, app: FastAPI, *, drain_s: float) -> None:
        """`drain_s`: how long running requests may still finish after a stop; then they are cancelled."""
        settings: ServerSettings = app.state.server.settings
        limits = ConnectionLimits(
            max_connections=settings.max_connections or connections_that_fit(),
            request_timeout_s=settings.request_timeout_s,
            untimed_paths=UNBOUNDED_PATHS,
        )
        protocol: Any = functools.partial(Connection, limits=limits, refusals=OneLine())
        config = uvicorn.Config(
            app,
            http=protocol,
            backlog=ACCEPTED_AT_ONCE,
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=max(1, round(drain_s)),
        )
        super().__init__(config)
        self._state: ServerState = app.state.server
        self.handles_signals = False

    def stop(self) -> None:
        """A second call does not wait for running requests any longer."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        logger.info("%s: stopping", signal.Signals(sig).name)
        self.stop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if not self.handles_signals:
            yield
            return
        previous = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in previous.items():
                signal.signal(sig, handler)

    async def run_on(
        self, sock: socket.socket, *, handle_signals: bool, on_ready: Callable[[], None]
    ) -> None:
        """Serve until stopped; returns when no request task runs any more. Closes `sock`."""
        self.handles_signals = handle_signals
        quiet_when_out_of_files(asyncio.get_running_loop())
        serving = asyncio.create_task(self.serve(sockets=[sock]))
        while not self.started and not serving.done():
            await asyncio.sleep(0.005)
        if self.started:
            # uvicorn's backlog is also how many asyncio accepts at once; the kernel may hold more.
            sock.listen(_BACKLOG)
            on_ready()
        try:
            await serving
        finally:
            await self._end_tasks()
            self._state.close()

    async def _end_tasks(self) -> None:
        """Wait for requests that outlived the drain to clean up.

        They were cancelled: engine requests end, objects are deleted.
        """
        tasks = set(self.server_state.tasks)
        for task in tasks:
            # Once: a second time would break off the clean-up.
            if not task.cancelling():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_WAIT_S)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not listening yet; port 0 lets the system choose.

    Raises ConfigurationError naming the remedy.
    """
    try:
        return bind_tcp(host, port)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(
            f"cannot listen on {host_and_port(host, port)}: {reason}; choose another --port or --host"
        ) from error
