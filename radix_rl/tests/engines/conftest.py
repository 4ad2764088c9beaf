"""An engine that can be held, aborted and told to fail; our own server over it on a loopback socket."""

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import numpy as np
import pytest

from radix_engine_plugins.writer import OutputStoreWriter
from radix_rl.addresses import host_and_port
from radix_rl.buckets.bucket import WeightBucket
from radix_rl.engines.base import Engine, EngineCapabilities, EngineInfo, MemoryTag, PauseMode
from radix_rl.errors import EngineDeadError
from radix_rl.server.app import create_app
from radix_rl.server.runner import HttpServer, bind
from radix_rl.server.settings import ServerSettings
from radix_rl.types import FinishReason, GenerateOutput, GenerateRequest, SamplingParams, VersionSpan
from radix_transfer_plugins import OutputStore, TokenOutputStash, create_backend


class HoldableEngine(Engine):
    """Output token c is 5 + c; row t of the routed experts (2 layers, top-2) is `[[t, 0], [-1, -1]]`.

    While `free` is clear, requests wait until it is set or they are aborted.
    """

    def __init__(self, writer: OutputStoreWriter | None = None) -> None:
        self.writer = writer
        self.free = asyncio.Event()
        self.free.set()
        self.running: dict[str, asyncio.Event] = {}
        self.served: list[GenerateRequest] = []
        self.failures: list[BaseException] = []
        self.healthy = True
        self.version = "0"
        self.calls: list[Any] = []
        self.updated: dict[str, list] = {}

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            routed_experts=True,
            indexer_topk=False,
            sampling_mask=False,
            output_store="memory" if self.writer else None,
            pause_modes=("abort", "retract", "in_place"),
            sleep_tags=("weights", "kv_cache"),
            weight_transports=("memory",),
        )

    async def start(self) -> EngineInfo:
        return await self.info()

    async def info(self) -> EngineInfo:
        return EngineInfo(
            model_path="/models/held",
            weight_version=self.version,
            context_length=64,
            vocab_size=100,
            num_layers=2,
            num_experts=64,
            experts_per_token=2,
        )

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        self.served.append(request)
        aborted = self.running[request.request_id] = asyncio.Event()
        try:
            if self.failures:
                raise self.failures.pop(0)
            waits = [asyncio.ensure_future(event.wait()) for event in (self.free, aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            return await self._answer(request, aborted.is_set())
        finally:
            del self.running[request.request_id]

    async def _answer(self, request: GenerateRequest, aborted: bool) -> GenerateOutput:
        count = request.sampling.max_new_tokens
        rows = None
        if request.return_routed_experts:
            end = len(request.input_ids) + max(count - 1, 0)
            tokens = range(request.routed_experts_start_len, end)
            rows = np.array([[[t, 0], [-1, -1]] for t in tokens], np.int32).reshape(-1, 2, 2)
        ref = None
        if request.return_outputs_via_store:
            assert self.writer is not None
            stash = TokenOutputStash(routed_experts=rows)
            starts = {"routed_experts": request.routed_experts_start_len}
            ref, rows = await self.writer.write(stash, starts), None
        return GenerateOutput(
            request_id=request.request_id,
            prompt_tokens=len(request.input_ids),
            output_ids=tuple(range(5, 5 + count)),
            output_logprobs=tuple(-0.25 * (c + 1) for c in range(count)),
            finish_reason=FinishReason(type="abort", message="asked to")
            if aborted
            else FinishReason(type="stop", matched=9),
            version_spans=(VersionSpan(0, 1, "0"), VersionSpan(1, count, "1")),
            cached_tokens=3,
            outputs=TokenOutputStash(routed_experts=rows) if rows is not None else None,
            routed_experts_start=request.routed_experts_start_len,
            output_store_ref=ref,
        )

    async def abort(self, request_id: str | None = None, message: str | None = None) -> None:
        self.calls.append(("abort", request_id))
        for name, event in self.running.items():
            if request_id in (None, name):
                event.set()

    async def pause(self, mode: PauseMode = "in_place") -> None:
        self.calls.append(("pause", mode))

    async def resume(self) -> None:
        self.calls.append("resume")

    async def sleep(self, tags: Collection[MemoryTag] = ("weights", "kv_cache")) -> None:
        self.calls.append(("sleep", tuple(tags)))

    async def wake(self, tags: Collection[MemoryTag] = ("weights", "kv_cache")) -> None:
        self.calls.append(("wake", tuple(tags)))

    async def flush_cache(self) -> None:
        self.calls.append("flush")

    async def begin_weight_update(self, version: str) -> None:
        self.calls.append(("begin", version))

    async def update_weights(self, bucket: WeightBucket) -> None:
        self.updated |= {name: tensor.tolist() for name, tensor in bucket.tensors()}

    async def commit_weight_update(self, version: str) -> None:
        self.calls.append(("commit", version))
        self.version = version

    async def abort_weight_update(self) -> None:
        self.calls.append("abort_update")

    async def health(self) -> None:
        if not self.healthy:
            raise EngineDeadError("its worker is gone")

    async def close(self) -> None: ...


class LocalServer:
    """Our server in this event loop."""

    def __init__(self, engine: HoldableEngine, url: str, server: HttpServer) -> None:
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
            engine = HoldableEngine(writer)
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
def holdable() -> Callable[[], HoldableEngine]:
    return HoldableEngine


@pytest.fixture
def request_for() -> Callable[..., GenerateRequest]:
    """Four prompt tokens, three output tokens."""

    def make(request_id: str = "r", **changes: Any) -> GenerateRequest:
        fields = {"input_ids": (1, 2, 3, 4), "sampling": SamplingParams(max_new_tokens=3)} | changes
        return GenerateRequest(request_id=request_id, **fields)

    return make
