"""HTTP connections: how many there may be, and how long a client may take to send its request."""

import asyncio
import logging
import os
import resource
import time
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from radix_rl.server.generation.exchange import TRANSPORT

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 8
"""Connections that the event loop accepts before it looks at them."""
_SPARE_FILES = 32 + 6 * ACCEPTED_AT_ONCE
"""For files that the engine opens, and for connections that were accepted and are about to be refused."""
_LOG_EVERY_S = 10.0
_OUT_OF_FILES = "socket.accept() out of system resource"
"""asyncio's name for it."""

_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_connections: int
    request_timeout_s: float
    """How long the head of a request may take, and then its body; a client without a word is one, too."""
    untimed_paths: frozenset[str] = frozenset()
    """Whose bodies have a time limit of their own."""


def connections_that_fit() -> int:
    """As many as there are free file descriptors, less what else needs some."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(limit - len(os.listdir("/proc/self/fd")) - _SPARE_FILES, ACCEPTED_AT_ONCE)


class OneLine:
    """Logs the first of many like events, and at most one each 10 s after it."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def warn(self, message: str, *args: object) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LOG_EVERY_S
            logger.warning(message, *args)


class Connection(H11Protocol):
    """One client's connection.

    Tells the application its transport (see exchange.py): ASGI itself learns of a client's leaving some
    passes of the event loop after the transport has begun to drop what is written.
    """

    def __init__(self, *args: Any, limits: ConnectionLimits, refusals: OneLine, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._refusals = refusals
        self._awaited: object = None
        """The part of a request that is on the way, as h11's state of the client; None: none."""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refusals.warn(
                "connections are refused: all %d are taken; raise the limit of open files (ulimit -n) or "
                "--max-connections",
                self._limits.max_connections,
            )
            transport.write(_TOO_MANY)
            transport.close()
            return
        # Waiting for the transport then means that everything written before is with the kernel.
        transport.set_write_buffer_limits(high=0)
        application = self.app

        async def with_transport(scope: Any, receive: Any, send: Any) -> None:
            scope[TRANSPORT] = transport
            await application(scope, receive, send)

        self.app = with_transport
        self._await(h11.IDLE)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        state = self.conn.their_state
        self._await(state if state in (h11.IDLE, h11.SEND_BODY) else None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        super().connection_lost(exc)

    def _await(self, part: object) -> None:
        """The time for a part begins once, however many pieces it comes in."""
        if part is self._awaited:
            return
        self._awaited = part
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        is_untimed = part is h11.SEND_BODY and self.scope["path"].rstrip("/") in self._limits.untimed_paths
        if part is not None and not is_untimed:
            self._deadline = self.loop.call_later(self._limits.request_timeout_s, self._end)

    def _end(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_TOO_SLOW)
        self.transport.close()


def quiet_when_out_of_files(loop: asyncio.AbstractEventLoop) -> None:
    """One line in place of asyncio's traceback for each connection that could not be accepted."""
    out_of_files = OneLine()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") == _OUT_OF_FILES:
            out_of_files.warn("out of file descriptors: connections wait for a second (ulimit -n)")
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
