"""What every engine promises, asked of each.

The embedded one, the same behind HTTP, both in a pool, and the scripted one.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from radix_engine_plugins.writer import OutputStoreWriter
from radix_rl.config.engine import RemoteSettings
from radix_rl.config.output_store import OutputStoreConfig
from radix_rl.engines.base import Engine
from radix_rl.engines.embedded.config import EmbeddedEngineSetup
from radix_rl.engines.embedded.engine import EmbeddedEngine
from radix_rl.engines.pool import EnginePool
from radix_rl.engines.remote.engine import RemoteEngine
from radix_rl.errors import RequestError
from radix_rl.server.app import create_app
from radix_rl.server.runner import HttpServer, bind
from radix_rl.server.settings import ServerSettings
from radix_rl.testing import Answer, EngineConformance, ScriptedEngine, tiny_model, tiny_tokenizer
from radix_rl.testing.scripted_engine import numbered_rows
from radix_rl.types import GenerateRequest
from radix_transfer_plugins import OutputStore, create_backend


def model() -> PreTrainedModel:
    """The same weights each time."""
    return tiny_model("qwen3_moe")


def embedded(store_config: dict[str, Any]) -> EmbeddedEngine:
    settings = EmbeddedEngineSetup(
        dtype="float32",
        kv_cache_tokens=2048,
        context_length=1000,
        enable_return_routed_experts=True,
        num_threads=1,
        output_store=OutputStoreConfig(backend="memory", config=store_config),
    )
    return EmbeddedEngine(settings, model=model(), tokenizer=tiny_tokenizer())


@contextlib.asynccontextmanager
async def served(engine: EmbeddedEngine, store: OutputStore) -> AsyncIterator[Engine]:
    """A client of a server over `engine`."""
    await engine.start()
    settings = ServerSettings(
        model_path="/models/tiny",
        served_model_name="tiny",
    )
    server = HttpServer(create_app(engine, tiny_tokenizer(), settings, writer=engine.writer), drain_s=1)
    sock = bind("127.0.0.1", 0)
    ready = asyncio.Event()
    serving = asyncio.create_task(server.run_on(sock, handle_signals=False, on_ready=ready.set))
    await asyncio.wait_for(ready.wait(), 20)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    client = RemoteEngine(url, RemoteSettings(), needs_output_store="memory", store=store)
    try:
        yield client
    finally:
        await client.close()
        server.stop()
        await serving
        await engine.close()


class OverTinyModel(EngineConformance):
    @pytest.fixture
    def store(self, memory_store) -> OutputStore:
        return memory_store[0]

    @pytest.fixture
    def other_weights(self) -> list[tuple[str, torch.Tensor]]:
        other = model()
        with torch.no_grad():
            other.lm_head.weight.copy_(other.lm_head.weight.flip(0))
        return [*other.named_parameters()]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"max_new_tokens": 2000}, "context length of 1000"),
            ({"return_indexer_topk": True}, "return_indexer_topk"),
            ({"return_outputs_via_store": True}, "nothing to store was asked for"),
        ],
    )
    async def test_what_can_never_be_answered_is_named_before_anything_starts(
        self, started, changes, message
    ):
        with pytest.raises(RequestError, match=message):
            started.check(self.ask(**changes))

    async def test_tokens_are_those_of_the_model(self, started):
        expected = model().generate(
            torch.tensor([self.prompt_ids]), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        output = await started.generate(self.ask())
        assert output.output_ids == tuple(expected[0, len(self.prompt_ids) :].tolist())


class TestEmbedded(OverTinyModel):
    @pytest.fixture
    def engine(self, memory_store) -> Engine:
        return embedded(memory_store[1])


class TestOverHttp(OverTinyModel):
    @pytest.fixture
    async def engine(self, memory_store) -> AsyncIterator[Engine]:
        store, config = memory_store
        async with served(embedded(config), store) as client:
            yield client


class TestPool(OverTinyModel):
    @pytest.fixture
    async def engine(self, memory_store) -> AsyncIterator[Engine]:
        store, config = memory_store
        async with served(embedded(config), store) as client:
            yield EnginePool([embedded(config), client])


class TestScripted(EngineConformance):
    """Its tokens follow from the weights that it was sent."""

    @pytest.fixture
    async def engine(self, memory_store) -> AsyncIterator[Engine]:
        writer = OutputStoreWriter(OutputStore(backend=create_backend("memory", memory_store[1])))

        def shifted(request: GenerateRequest) -> Answer:
            shift = int(engine.weights.get("shift", torch.tensor(0)))
            count = request.sampling.max_new_tokens
            return Answer(output_ids=[shift + token for token in range(count)], step_s=0.001)

        engine = ScriptedEngine(shifted, writer=writer)
        yield engine
        await writer.close()

    @pytest.fixture
    def store(self, memory_store) -> OutputStore:
        return memory_store[0]

    @pytest.fixture
    def other_weights(self) -> list[tuple[str, torch.Tensor]]:
        return [("shift", torch.tensor(5))]


class TestScriptedWithoutAnything(EngineConformance):
    """What an engine leaves out it refuses, and the suite asks for no more."""

    @pytest.fixture
    def engine(self) -> Engine:
        return ScriptedEngine(
            lambda request: Answer(output_ids=range(request.sampling.max_new_tokens), step_s=0.001),
            routed_experts=False,
            sampling_mask=False,
            pause_modes=("in_place",),
            sleep_tags=(),
            weight_transports=(),
        )


def test_rows_of_the_scripted_engine_tell_their_place():
    np.testing.assert_array_equal(numbered_rows(2, 1, 3), [[[0, 1, 2]], [[100, 101, 102]]])
