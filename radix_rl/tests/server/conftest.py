import asyncio
import contextlib
import functools
import json
import threading
import uuid
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from radix_engine_plugins.writer import OutputStoreWriter
from radix_rl.config.output_store import OutputStoreConfig
from radix_rl.engines.base import Engine, EngineInfo, check_outputs
from radix_rl.engines.embedded.config import EmbeddedEngineSetup
from radix_rl.engines.embedded.engine import EmbeddedEngine
from radix_rl.engines.embedded.schedule.limits import RequestLimits
from radix_rl.server.app import create_app
from radix_rl.server.runner import HttpServer, bind
from radix_rl.server.settings import ServerSettings
from radix_rl.testing import Answer, ScriptedEngine
from radix_rl.types import GenerateRequest
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


class LetterEngine(ScriptedEngine):
    """Answers with the letters after the prompt's last one, `step_s` apart; refuses what real engines refuse.

    Token i's routed experts are `[[i, token], [-1, -1]]`. Requests whose ids are in `fail_ids` fail.
    """

    def __init__(self, writer: OutputStoreWriter | None, **capabilities: Any) -> None:
        info = EngineInfo(
            model_path="/models/letters",
            weight_version="0",
            context_length=512,
            vocab_size=len(VOCAB) + 1,
            num_layers=2,
            num_experts=256,
            experts_per_token=2,
        )
        super().__init__(self._letters, writer=writer, info=info, **capabilities)
        self.step_s = 0.0
        self.fail_ids: set[str] = set()
        self._limits = RequestLimits(
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            kv_cache_tokens=1 << 20,
            sampling_mask_max_tokens=info.vocab_size,
            has_tokenizer=True,
        )

    def check(self, request: GenerateRequest) -> None:
        check_outputs(request, self.capabilities)
        self._limits.check(request)

    def _letters(self, request: GenerateRequest) -> Answer:
        first = request.input_ids[-1] + 1
        output_ids = [(first + c) % EOS for c in range(request.sampling.max_new_tokens)]
        tokens = [*request.input_ids, *output_ids]
        return Answer(
            output_ids=output_ids,
            routed_experts=np.array([[[i, t], [-1, -1]] for i, t in enumerate(tokens)], np.int32),
            sampling_mask=[[token, 0] for token in output_ids],
            cached_tokens=1,
            step_s=self.step_s,
            error=RuntimeError("this one fails") if request.request_id in self.fail_ids else None,
        )


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


async def make_letters(
    config: dict[str, Any] | None, **capabilities: Any
) -> tuple[Engine, Any, OutputStoreWriter | None]:
    """Engine, tokenizer and writer; `config` is the memory backend's, None: no store."""
    writer = OutputStoreWriter(OutputStore(backend=create_backend("memory", config))) if config else None
    return LetterEngine(writer, **capabilities), letter_tokenizer(), writer


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
    capabilities: dict[str, Any] | None = None,
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
        engine, tokenizer, writer = await make(config if store else None, **(capabilities or {}))
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
        engine = LetterEngine(self.writer)
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
