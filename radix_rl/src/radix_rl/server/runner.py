"""Running the application on a socket until a signal, and an orderly end."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from radix_rl.addresses import bind_tcp, host_and_port
from radix_rl.errors import ConfigurationError
from radix_rl.server.generation.exchange import TRANSPORT
from radix_rl.server.state import ServerState

logger = logging.getLogger(__name__)

_CANCEL_WAIT_S = 10.0


class _TransportProtocol(H11Protocol):
    """Tells the application the connection's transport (see exchange.py): ASGI itself learns of a client's
    leaving
    some passes of the event loop after the transport has begun to drop what is written."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Waiting for the transport then means that everything written before is with the kernel.
        transport.set_write_buffer_limits(high=0)
        application = self.app

        async def with_transport(scope: Any, receive: Any, send: Any) -> None:
            scope[TRANSPORT] = transport
            await application(scope, receive, send)

        self.app = with_transport


class HttpServer(uvicorn.Server):
    """Stops on `stop`, or on SIGINT and SIGTERM while `serve` runs with `handle_signals`.

    uvicorn's own way raises the signal again when it is done, which would end the process before the engine
    and the store are closed; here the signals only stop the serving.
    """

    def __init__(self, app: FastAPI, *, drain_s: float, access_log: bool = False) -> None:
        """`drain_s`: how long running requests may still finish after a stop; then they are cancelled."""
        config = uvicorn.Config(
            app,
            http=_TransportProtocol,
            lifespan="off",
            log_config=None,
            access_log=access_log,
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
        serving = asyncio.create_task(self.serve(sockets=[sock]))
        while not self.started and not serving.done():
            await asyncio.sleep(0.005)
        if self.started:
            on_ready()
        try:
            await serving
        finally:
            await self._end_tasks()
            self._state.close()

    async def _end_tasks(self) -> None:
        """What outlived the drain was cancelled and still cleans up: engine requests end, objects are
        deleted.
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
