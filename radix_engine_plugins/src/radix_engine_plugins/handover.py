"""Who owns a stored object: this process, until the reference has gone out to a client that still listens.

What does not get that far is deleted. Common to the HTTP servers of all engines: the embedded engine's server
sends its answers itself and uses `Owned` alone; SGLang's and vLLM's send theirs past the plugin, so that the
app is wrapped in `HandoverMiddleware`. In process there is no client beyond the caller: there an object is
handed over when the caller gets the reference.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

import anyio

from radix_engine_plugins.writer import OutputStoreWriter
from radix_transfer_plugins import StoreRef

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Owned:
    """References that this process owns, by key. Used by one event loop."""

    def __init__(self) -> None:
        self._refs: dict[str, tuple[StoreRef, OutputStoreWriter]] = {}
        self._closed = False

    def add(self, ref: StoreRef, writer: OutputStoreWriter) -> None:
        """After `close` the object is deleted at once: a late answer that nobody waits for leaves nothing."""
        self._refs[ref.key] = (ref, writer)
        if self._closed:
            self.discard_all()

    def move(self, key: str, to: "Owned | None") -> None:
        """Hand a reference on; None: to the client."""
        entry = self._refs.pop(key, None)
        if entry is not None and to is not None:
            to.add(*entry)

    def keys_in(self, body: bytes) -> list[str]:
        return [key for key in self._refs if key.encode() in body]

    def discard_all(self) -> None:
        """Delete in the background what was not handed on."""
        for ref, writer in self._refs.values():
            writer.discard([ref])
        self._refs.clear()

    def close(self) -> None:
        """Delete what was not handed on, and from here on whatever is added. Idempotent."""
        self._closed = True
        self.discard_all()

    def __contains__(self, key: str) -> bool:
        return key in self._refs

    def __bool__(self) -> bool:
        return bool(self._refs)


_http_request: ContextVar[Owned | None] = ContextVar("radix_http_request", default=None)


def http_receiver() -> Owned | None:
    """What the HTTP request of this context owns; None: the caller is in this process."""
    return _http_request.get()


class HandoverMiddleware:
    """ASGI: owns the references of one HTTP request until their bytes are sent."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        owned = Owned()
        token = _http_request.set(owned)

        async def send_and_note(message: Message) -> None:
            keys = owned.keys_in(message.get("body", b"")) if owned else []
            if keys and await _client_has_left(receive):
                keys = []
            await send(message)
            for key in keys:
                owned.move(key, to=None)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            _http_request.reset(token)
            owned.close()


async def _client_has_left(receive: Receive) -> bool:
    """Servers drop what is sent to a client that has left, in silence, but say so here. Does not wait."""
    message: Message = {}
    with anyio.CancelScope() as at_once:
        at_once.cancel()
        message = await receive()
    return message.get("type") == "http.disconnect"
