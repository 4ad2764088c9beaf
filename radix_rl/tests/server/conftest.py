import asyncio
import contextlib
import functools
import json
import threading
import uuid
from collections.abc import AsyncIterator, Collection
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from radix_engine_plugins.collector import TokenOutputCollector
from radix_engine_plugins.writer import OutputStoreWriter
from radix_rl.buckets.bucket import WeightBucket
from radix_rl.config.output_store import OutputStoreConfig
from radix_rl.engines.base import Engine, EngineCapabilities, EngineInfo, MemoryTag, PauseMode
from radix_rl.engines.embedded.config import EmbeddedEngineSetup
from radix_rl.engines.embedded.engine import EmbeddedEngine
from radix_rl.engines.embedded.schedule.limits import RequestLimits
from radix_rl.errors import EngineDeadError, EngineStateError, RequestError
from radix_rl.server.app import create_app
from radix_rl.server.runner import HttpServer, bind
from radix_rl.server.settings import ServerSettings
from radix_rl.types import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    PartialOutput,
    VersionSpan,
)
from radix_transfer_plugins import OutputStore, create_backend

VOCAB = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.!?0123456789"
EOS = len(VOCAB)


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter; EOS is the last id."""
    letters = Tokenizer(models.BPE({letter: index for index, letter in enumerate(VOCAB)}, []))
    letters.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<eos>")
    fast.chat_template = "{% for message in messages %}{{ message.content }}{{ separator }}{% endfor %}"
    return fast


class LetterEngine(Engine):
    """Answers with the letters after the prompt's last one, one at a time, `step_s` apart.

    Token i's routed experts are `[[i, token], [-1, -1]]`. Faults: `fail_with` makes every generate raise
    after its first token; `state_error` makes `health` and new requests raise.
    """

    def __init__(self, writer: OutputStoreWriter | None, backend: str | None) -> None:
        self.writer = writer
        self.backend = backend
        self.routed_experts = True
        self.step_s = 0.0
        self.fail_with: Exception | None = None
        self.fail_ids: set[str] = set()
        self.state_error: Exception | None = None
        self.version = "0"
        self.abort_message = "asked to"
        self.running: dict[str, asyncio.Event] = {}
        self.calls: list[Any] = []
        self.unpaused = asyncio.Event()
        self.unpaused.set()

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            routed_experts=self.routed_experts,
            indexer_topk=False,
            sampling_mask=True,
            output_store=self.backend,
            pause_modes=("abort", "retract", "in_place"),
            sleep_tags=("weights", "kv_cache"),
            weight_transports=("memory",),
        )

    def check(self, request: GenerateRequest) -> None:
        super().check(request)
        limits = RequestLimits(
            vocab_size=EOS + 1,
            context_length=512,
            kv_cache_tokens=1 << 20,
            sampling_mask_max_tokens=EOS + 1,
            has_tokenizer=True,
        )
        limits.check(request)

    async def start(self) -> EngineInfo:
        return await self.info()

    async def info(self) -> EngineInfo:
        return EngineInfo(
            model_path="/models/letters",
            weight_version=self.version,
            context_length=512,
            vocab_size=len(VOCAB) + 1,
            num_layers=2,
            num_experts=256,
            experts_per_token=2,
        )

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        async for output in self.stream(request):
            if isinstance(output, GenerateOutput):
                return output
        raise AssertionError("a stream ends with its output")

    async def stream(self, request: GenerateRequest) -> AsyncIterator[PartialOutput | GenerateOutput]:
        if self.state_error is not None:
            raise self.state_error
        if request.request_id in self.running:
            raise RequestError(f"duplicate {request.request_id}")
        aborted = self.running[request.request_id] = asyncio.Event()
        try:
            await self.unpaused.wait()
            ids: list[int] = []
            while len(ids) < request.sampling.max_new_tokens and not aborted.is_set():
                await asyncio.sleep(self.step_s)
                if self.fail_with is not None or request.request_id in self.fail_ids:
                    raise self.fail_with or RuntimeError("this one fails")
                ids.append((([*request.input_ids, *ids][-1]) + 1) % EOS)
                if ids[-1] in request.sampling.stop_token_ids:
                    break
                yield PartialOutput(
                    request_id=request.request_id,
                    prompt_tokens=len(request.input_ids),
                    output_ids=tuple(ids),
                    output_logprobs=tuple(-0.5 for _ in ids),
                    version_spans=(VersionSpan(0, len(ids), self.version),),
                )
            yield await self._finish(request, ids, aborted.is_set())
        finally:
            self.running.pop(request.request_id, None)

    async def _finish(self, request: GenerateRequest, ids: list[int], aborted: bool) -> GenerateOutput:
        stops = request.sampling.stop_token_ids
        if aborted:
            reason = FinishReason(type="abort", message=self.abort_message)
        elif ids and ids[-1] in stops:
            reason = FinishReason(type="stop", matched=ids[-1])
        else:
            reason = FinishReason(type="length", length=request.sampling.max_new_tokens)
        stash, start_rows = self._replay(request, ids)
        ref = None
        if stash is not None and request.return_outputs_via_store:
            assert self.writer is not None
            ref = await self.writer.write(stash, start_rows)
        return GenerateOutput(
            request_id=request.request_id,
            prompt_tokens=len(request.input_ids),
            output_ids=tuple(ids),
            output_logprobs=tuple(-0.5 for _ in ids),
            finish_reason=reason,
            version_spans=(VersionSpan(0, len(ids), self.version),) if ids else (),
            weight_version=self.version,
            cached_tokens=1,
            outputs=None if ref else stash,
            routed_experts_start=request.routed_experts_start_len,
            output_store_ref=ref,
        )

    def _replay(self, request: GenerateRequest, ids: list[int]) -> tuple[Any, dict[str, int]]:
        if not (request.return_routed_experts or request.return_sampling_mask):
            return None, {}
        support = request.sampling_logprobs_mode == "support"
        collector = TokenOutputCollector(
            routed_experts_shape=(2, 2) if request.return_routed_experts else None,
            sampling_mask=request.return_sampling_mask,
            sampling_mask_logprobs=request.return_sampling_mask and support,
            start_row=request.routed_experts_start_len,
        )
        forwarded = len(request.input_ids) + max(len(ids) - 1, 0)
        if request.return_routed_experts:
            tokens = [*request.input_ids, *ids][:forwarded]
            rows = np.array([[[i, t], [-1, -1]] for i, t in enumerate(tokens)], np.int32).reshape(-1, 2, 2)
            collector.add_routed_experts(rows)
        if request.return_sampling_mask:
            for token in ids:
                mask_logprobs = np.array([-0.5, -1.0], np.float32) if support else None
                collector.add_sampling_mask(np.array([token, 0], np.int32), mask_logprobs)
        return collector.to_stash(forwarded), collector.start_rows()

    async def abort(self, request_id: str | None = None, message: str | None = None) -> None:
        self.abort_message = message or "asked to"
        for name, event in self.running.items():
            if request_id in (None, name):
                event.set()

    async def pause(self, mode: PauseMode = "in_place") -> None:
        if not self.unpaused.is_set():
            raise EngineStateError("paused already")
        self.calls.append(("pause", mode))
        self.unpaused.clear()

    async def resume(self) -> None:
        self.unpaused.set()

    async def sleep(self, tags: Collection[MemoryTag] = ("weights", "kv_cache")) -> None:
        self.calls.append(("sleep", tuple(tags)))

    async def wake(self, tags: Collection[MemoryTag] = ("weights", "kv_cache")) -> None:
        self.calls.append(("wake", tuple(tags)))

    async def flush_cache(self) -> None:
        self.calls.append("flush")

    async def begin_weight_update(self, version: str) -> None:
        self.calls.append(("begin", version))

    async def update_weights(self, bucket: WeightBucket) -> None:
        self.calls.append(("update", {name: tensor.clone() for name, tensor in bucket.tensors()}))

    async def commit_weight_update(self, version: str) -> None:
        self.calls.append(("commit", version))
        self.version = version

    async def set_weight_version(self, version: str) -> None:
        self.version = version

    async def abort_weight_update(self) -> None:
        self.calls.append("abort_update")

    async def health(self) -> None:
        if self.state_error is not None:
            raise EngineDeadError(str(self.state_error))

    async def close(self) -> None:
        self.calls.append("close")


class RunningServer:
    """A server on a real loopback socket, its engine on a thread of its own."""

    def __init__(
        self, url: str, engine: Any, tokenizer: Any, writer: OutputStoreWriter | None, store: OutputStore
    ) -> None:
        self.url = url
        self.engine = engine
        self.tokenizer = tokenizer
        self.writer = writer
        self.store = store
        """A second view of the server's store, for assertions."""
        self.client = httpx.Client(base_url=url, timeout=30)

    def generate(self, **body: Any) -> httpx.Response:
        return self.client.post("/generate", json=body)

    def objects(self) -> set[str]:
        """Keys of stored objects, field names cut off."""
        return {info.key.rpartition("/")[0] for info in self.store.list_objects()}


async def make_letters(config: dict[str, Any] | None) -> tuple[Engine, Any, OutputStoreWriter | None]:
    """Engine, tokenizer and writer; `config` is the memory backend's, None: no store."""
    writer = OutputStoreWriter(OutputStore(backend=create_backend("memory", config))) if config else None
    return LetterEngine(writer, "memory" if config else None), letter_tokenizer(), writer


async def make_embedded(
    config: dict[str, Any] | None, **changes: Any
) -> tuple[Engine, Any, OutputStoreWriter | None]:
    """The real engine over a tiny random Qwen3-MoE and a tokenizer of one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }};{% endfor %}"
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(fast),
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=256,
            eos_token_id=fast.eos_token_id,
        )
    )
    engine = EmbeddedEngine(
        EmbeddedEngineSetup(
            dtype="float32",
            max_running_requests=16,
            enable_return_routed_experts=True,
            num_threads=1,
            output_store=OutputStoreConfig(backend="memory", config=config) if config else None,
            **({"kv_cache_tokens": 1024} | changes),
        ),
        model=model,
        tokenizer=fast,
    )
    await engine.start()
    return engine, engine.tokenizer, engine.writer


@contextlib.contextmanager
def _running(
    views: list[OutputStore],
    make: Any = make_letters,
    *,
    store: bool = True,
    chat_template: str | None = None,
    **settings: Any,
):
    config = {"name": uuid.uuid4().hex, "key_prefix": "test/run"}
    view = OutputStore(backend=create_backend("memory", config))
    views.append(view)
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    ready = threading.Event()
    holder: dict[str, Any] = {}

    async def main() -> None:
        engine, tokenizer, writer = await make(config if store else None)
        tokenizer.chat_template = chat_template or tokenizer.chat_template
        defaults = {
            "model_path": "/models/letters",
            "served_model_name": "letters",
        }
        try:
            app = create_app(engine, tokenizer, ServerSettings(**(defaults | settings)), writer=writer)
            server = HttpServer(app, drain_s=1)
            holder.update(server=server, loop=asyncio.get_running_loop())
            url = f"http://127.0.0.1:{port}"
            holder["running"] = RunningServer(url, engine, tokenizer, writer, view)
            await server.run_on(sock, handle_signals=False, on_ready=ready.set)
        finally:
            await engine.close()
            if writer is not None:
                await writer.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(60), "the server did not start"
        yield holder["running"]
    finally:
        if "server" in holder:
            holder["loop"].call_soon_threadsafe(holder["server"].stop)
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def run_server():
    """`with run_server(...) as server`; `server.objects()` may be asked after it has stopped, too."""
    views: list[OutputStore] = []
    yield functools.partial(_running, views)
    for view in views:
        view.close()


@pytest.fixture
def server(run_server):
    with run_server() as running:
        yield running


@pytest.fixture(scope="module")
def embedded_server():
    views: list[OutputStore] = []
    with _running(views, make_embedded) as running:
        yield running
    for view in views:
        view.close()


@pytest.fixture
def run_embedded():
    """`with run_embedded(**settings of the engine) as server`."""
    views: list[OutputStore] = []
    yield lambda **changes: _running(views, functools.partial(make_embedded, **changes))
    for view in views:
        view.close()


@pytest.fixture(scope="module")
def shared_server():
    """For tests that leave nothing behind and look at no other's objects."""
    views: list[OutputStore] = []
    with _running(views) as running:
        yield running
    for view in views:
        view.close()


class AsgiExchange:
    """Runs one stored request through the application without a socket."""

    def __init__(self) -> None:
        config = {"name": uuid.uuid4().hex, "key_prefix": "test/run"}
        self.writer = OutputStoreWriter(OutputStore(backend=create_backend("memory", config)))
        self.view = OutputStore(backend=create_backend("memory", config))
        settings = ServerSettings(
            model_path="/models/letters",
            served_model_name="letters",
        )
        engine = LetterEngine(self.writer, "memory")
        self.app = create_app(engine, letter_tokenizer(), settings, writer=self.writer)

    async def run(
        self, *, stream: bool, fail_at: int | None = None, leave_after: int | None = None
    ) -> list[dict[str, Any]]:
        """The messages sent.

        Sending message number `fail_at` raises; the client leaves after number `leave_after`.
        """
        body = json.dumps(
            {
                "text": "ab",
                "stream": stream,
                "sampling_params": {"max_new_tokens": 2},
                "return_routed_experts": True,
                "return_outputs_via_store": True,
            }
        ).encode()
        requests = [{"type": "http.request", "body": body, "more_body": False}]
        left = asyncio.Event()
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if requests:
                return requests.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if len(sent) == fail_at:
                raise ConnectionResetError("the peer is gone")
            if not left.is_set():
                sent.append(message)
            if len(sent) - 1 == leave_after:
                left.set()

        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
        await self.app(scope, receive, send)
        return sent

    def wire(self, sent: list[dict[str, Any]]) -> bytes:
        return b"".join(message.get("body", b"") for message in sent)

    async def num_objects(self) -> int:
        """After the deletes that were ordered have run."""
        await asyncio.wrap_future(self.writer._delete_thread.submit(lambda: None))
        return len(list(self.view.list_objects()))

    async def clear(self) -> None:
        self.view.delete_objects(older_than_s=0)


@pytest.fixture
async def asgi_exchange():
    exchange = AsgiExchange()
    yield exchange
    await exchange.writer.close()
    exchange.view.close()
