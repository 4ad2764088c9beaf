"""A scripted engine, and our own server over it on a loopback socket."""

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from radix_engine_plugins.writer import OutputStoreWriter
from radix_rl.addresses import host_and_port
from radix_rl.server.app import create_app
from radix_rl.server.runner import HttpServer, bind
from radix_rl.server.settings import ServerSettings
from radix_rl.testing import Answer, ScriptedEngine
from radix_rl.types import FinishReason, GenerateRequest, SamplingParams
from radix_transfer_plugins import OutputStore, create_backend


def held_engine(writer: OutputStoreWriter | None = None) -> ScriptedEngine:
    """Make an engine whose output token c is 5 + c, under version "0" at first and under "1" from then on."""

    def answer(request: GenerateRequest) -> Answer:
        count = request.sampling.max_new_tokens
        return Answer(
            output_ids=range(5, 5 + count),
            logprobs=[-0.25 * (c + 1) for c in range(count)],
            versions=["0", *["1"] * count][:count],
            finish_reason=FinishReason(type="stop", matched=9),
            cached_tokens=3,
        )

    return ScriptedEngine(answer, writer=writer)


class LocalServer:
    """Our server in this event loop."""

    def __init__(self, engine: ScriptedEngine, url: str, server: HttpServer) -> None:
        self.engine = engine
        self.url = url
        self._server = server

    def stop(self) -> None:
        """At once: running requests are cut off."""
        self._server.stop()
        self._server.stop()


@pytest.fixture
def memory_store():
    """`(store, config)`: the reader's client and what a writer needs."""
    config = {"name": uuid.uuid4().hex, "key_prefix": "test/run"}
    store = OutputStore(backend=create_backend("memory", config))
    yield store, config
    store.close()


@pytest.fixture
async def serve(memory_store) -> AsyncIterator[Callable[..., Any]]:
    """`await serve()` starts a server.

    Keywords replace its settings; `with_store=False` leaves the store out, `key_prefix` is another one.
    """
    _, config = memory_store
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            *,
            with_store: bool = True,
            key_prefix: str = config["key_prefix"],
            sock: socket.socket | None = None,
            **settings: Any,
        ) -> LocalServer:
            place = config | {"key_prefix": key_prefix}
            writer = (
                OutputStoreWriter(OutputStore(backend=create_backend("memory", place)))
                if with_store
                else None
            )
            engine = held_engine(writer)
            defaults = {
                "model_path": "/models/held",
                "served_model_name": "held",
            }
            app = create_app(engine, _Tokenizer(), ServerSettings(**(defaults | settings)), writer=writer)
            server = HttpServer(app, drain_s=1)
            sock = sock or bind("127.0.0.1", 0)
            address = host_and_port(*sock.getsockname()[:2])
            ready = asyncio.Event()
            serving = asyncio.create_task(server.run_on(sock, handle_signals=False, on_ready=ready.set))
            await asyncio.wait_for(ready.wait(), 20)

            async def end() -> None:
                local.stop()
                await asyncio.wait_for(serving, 20)
                if writer is not None:
                    await writer.close()

            local = LocalServer(engine, f"http://{address}", server)
            stack.push_async_callback(end)
            return local

        yield start


class _Tokenizer:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return " ".join(map(str, token_ids))


@pytest.fixture
def make_engine() -> Callable[[], ScriptedEngine]:
    return held_engine


@pytest.fixture
def request_for() -> Callable[..., GenerateRequest]:
    """Four prompt tokens, three output tokens."""

    def make(request_id: str = "r", **changes: Any) -> GenerateRequest:
        fields = {"input_ids": (1, 2, 3, 4), "sampling": SamplingParams(max_new_tokens=3)} | changes
        return GenerateRequest(request_id=request_id, **fields)

    return make
