"""What every engine promises (`engines/base.py`), asked of each: the embedded one, the same behind HTTP, and
both in a pool."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from radix_rl.buckets.bucket import pack_buckets
from radix_rl.config.engine import RemoteSettings
from radix_rl.config.output_store import OutputStoreConfig
from radix_rl.engines.base import Engine
from radix_rl.engines.embedded.config import EmbeddedEngineSetup
from radix_rl.engines.embedded.engine import EmbeddedEngine
from radix_rl.engines.pool import EnginePool
from radix_rl.engines.remote.engine import RemoteEngine
from radix_rl.errors import EngineError, EngineStateError, RequestError
from radix_rl.server.app import create_app
from radix_rl.server.runner import HttpServer, bind
from radix_rl.server.settings import ServerSettings
from radix_rl.types import GenerateOutput, GenerateRequest, SamplingParams
from radix_transfer_plugins import OutputStore, TokenOutputStash

PROMPT = tuple(range(3, 15))


class NoTokenizer:
    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return " ".join(map(str, token_ids))


@pytest.fixture
def make_model() -> Callable[[], PreTrainedModel]:
    """The same weights each time."""

    def make() -> PreTrainedModel:
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=1024,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return Qwen3MoeForCausalLM(config).eval()

    return make


@pytest.fixture
def store(memory_store) -> OutputStore:
    return memory_store[0]


@contextlib.asynccontextmanager
async def served(engine: EmbeddedEngine, store: OutputStore) -> AsyncIterator[Engine]:
    """A client of a server over `engine`."""
    await engine.start()
    settings = ServerSettings(
        model_path="/models/tiny",
        served_model_name="tiny",
    )
    server = HttpServer(create_app(engine, NoTokenizer(), settings, writer=engine.writer), drain_s=1)
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


@pytest.fixture(params=["embedded", "http", "pool"])
async def engine(request, make_model, memory_store) -> AsyncIterator[Engine]:
    store, config = memory_store

    def embedded() -> EmbeddedEngine:
        settings = EmbeddedEngineSetup(
            dtype="float32",
            kv_cache_tokens=2048,
            context_length=1000,
            enable_return_routed_experts=True,
            num_threads=1,
            output_store=OutputStoreConfig(backend="memory", config=config),
        )
        return EmbeddedEngine(settings, model=make_model(), tokenizer=NoTokenizer())

    async with contextlib.AsyncExitStack() as stack:
        made: Engine
        if request.param == "embedded":
            made = embedded()
        elif request.param == "http":
            made = await stack.enter_async_context(served(embedded(), store))
        else:
            made = EnginePool([embedded(), await stack.enter_async_context(served(embedded(), store))])
        stack.push_async_callback(made.close)
        await made.start()
        yield made


def ask(name: str = "r", **changes: Any) -> GenerateRequest:
    sampling = {"max_new_tokens": 6, "temperature": 0.0}
    own = {field: changes.pop(field) for field in list(changes) if field in GenerateRequest.__struct_fields__}
    return GenerateRequest(
        request_id=name, input_ids=PROMPT, sampling=SamplingParams(**(sampling | changes)), **own
    )


async def running(engine: Engine, **changes: Any) -> asyncio.Task[GenerateOutput]:
    """A request that has begun and takes long."""
    task = asyncio.create_task(engine.generate(ask("long", max_new_tokens=900, **changes)))
    await asyncio.sleep(0.25)
    assert not task.done()
    return task


async def send(engine: Engine, model: PreTrainedModel, version: str) -> None:
    await engine.begin_weight_update(version)
    for bucket in pack_buckets(model.named_parameters(), 1 << 14):
        await engine.update_weights(bucket)
    await engine.commit_weight_update(version)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 2000}, "context length of 1000"),
        ({"return_indexer_topk": True}, "return_indexer_topk"),
        ({"return_outputs_via_store": True}, "nothing to store was asked for"),
    ],
)
async def test_what_can_never_be_answered_is_refused_before_anything_starts(engine, changes, message):
    with pytest.raises(RequestError, match=message):
        engine.check(ask(**changes))
    engine.check(ask())


async def test_tokens_and_rows_are_those_of_the_model_inline_and_stored(engine, make_model, store):
    inline, stored = await asyncio.gather(
        engine.generate(ask("a", return_routed_experts=True)),
        engine.generate(ask("b", return_routed_experts=True, return_outputs_via_store=True)),
    )
    expected = make_model().generate(
        torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert inline.output_ids == stored.output_ids == tuple(expected[0, len(PROMPT) :].tolist())
    assert (inline.request_id, inline.finish_reason.type) == ("a", "length")
    ref = stored.output_store_ref
    (stash,) = store.read_many([(ref, ["routed_experts"])], stash_type=TokenOutputStash, buffer_bytes=1 << 20)
    assert stored.outputs is None
    assert stash.routed_experts.shape == (len(PROMPT) + 5, 2, 2)
    np.testing.assert_array_equal(stash.routed_experts, inline.outputs.routed_experts)
    store.delete_many([ref])


async def test_a_request_that_cannot_be_met_is_the_request_s_error(engine):
    for bad in (ask(max_new_tokens=5000), ask(top_p=0.0), ask(routed_experts_start_len=99)):
        if bad.routed_experts_start_len:
            bad = msgspec.structs.replace(bad, return_routed_experts=True)
        with pytest.raises(RequestError):
            await engine.generate(bad)
    assert len((await engine.generate(ask())).output_ids) == 6


async def test_paused_requests_wait_and_go_on(engine):
    request = ask("long", max_new_tokens=200)
    expected = await engine.generate(request)
    task = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0.05)
    await engine.pause("in_place")
    with pytest.raises(EngineStateError):
        await engine.pause("retract")
    queued = asyncio.create_task(engine.generate(ask("queued")))
    await asyncio.sleep(0.1)
    assert not task.done()
    assert not queued.done()
    await engine.resume()
    await engine.resume()
    assert (await task).output_ids == expected.output_ids
    assert len((await queued).output_ids) == 6


async def test_aborting_answers_with_what_there_is_and_an_unknown_id_is_ignored(engine, store):
    await engine.abort("nobody")
    task = await running(engine, return_routed_experts=True, return_outputs_via_store=True)
    await engine.abort("long")
    answer = await task
    assert answer.finish_reason.type == "abort"
    assert 0 < len(answer.output_ids) < 900
    ref = answer.output_store_ref
    assert ref.fields["routed_experts"].shape == (len(PROMPT) + len(answer.output_ids) - 1, 2, 2)
    store.delete_many([ref])


async def test_cancelling_aborts_and_leaves_no_object(engine, store):
    task = await running(engine, return_routed_experts=True, return_outputs_via_store=True)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # What the abort left is deleted behind the caller's back.
    await asyncio.sleep(0.1)
    for _ in range(500):
        if not list(store.list_objects()):
            break
        await asyncio.sleep(0.02)
    assert list(store.list_objects()) == []
    assert len((await engine.generate(ask("next"))).output_ids) == 6


async def test_new_weights_are_in_force_after_the_commit_and_not_before(engine, make_model):
    before = await engine.generate(ask())
    other = make_model()
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.flip(0))
    await engine.begin_weight_update("7")
    buckets = list(pack_buckets(other.named_parameters(), 1 << 14))
    await engine.update_weights(buckets[0])
    assert (await engine.generate(ask())).output_ids == before.output_ids
    await engine.abort_weight_update()
    await engine.abort_weight_update()
    assert (await engine.generate(ask())).output_ids == before.output_ids
    await send(engine, other, "7")
    after = await engine.generate(ask())
    assert (await engine.info()).weight_version == "7"
    assert after.output_ids != before.output_ids
    assert [span.version for span in after.version_spans] == ["7"]


async def test_dropped_weights_refuse_until_new_ones_are_whole(engine, make_model):
    before = await engine.generate(ask())
    await engine.sleep()
    await engine.sleep()
    for refused in (engine.generate(ask()), engine.health()):
        with pytest.raises(EngineError):
            await refused
    await engine.wake(["weights"])
    with pytest.raises(EngineError):
        await engine.generate(ask())
    await send(engine, make_model(), "1")
    await engine.wake(["kv_cache"])
    await engine.wake()
    await engine.health()
    assert (await engine.generate(ask())).output_ids == before.output_ids


async def test_closing_twice_is_harmless_and_ends_what_runs(engine):
    task = await running(engine)
    await engine.close()
    await engine.close()
    with pytest.raises((EngineError, RuntimeError)):
        await task
