"""Outputs through the store: the reference replaces the arrays.

Nothing stays behind that nobody holds.
"""

import asyncio
import shutil
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from radix_rl.config.output_store import OutputStoreConfig
from radix_rl.engines.embedded import engine as engine_module
from radix_rl.engines.embedded.build import build_writer
from radix_rl.engines.embedded.capture.rows import RowCapture
from radix_rl.engines.embedded.config import EmbeddedEngineSetup
from radix_rl.engines.embedded.engine import EmbeddedEngine
from radix_rl.errors import ConfigurationError
from radix_transfer_plugins import OutputStore, StoreRef, TokenOutputStash, create_backend
from radix_transfer_plugins.errors import StoreFullError

STORE = {"backend": "memory", "config": {"key_prefix": "test/embedded"}}


@pytest.fixture
def store():
    """A second client of the engine's store; empty at the start."""
    client = OutputStore(backend=create_backend("memory", STORE["config"]))
    client.delete_objects(older_than_s=0.0)
    yield client
    client.delete_objects(older_than_s=0.0)
    client.close()


async def test_stored_rows_equal_inline_rows(qwen3_moe, engine_of, prompt, request_of, store):
    fields = {"max_new_tokens": 8, "seed": 1, "return_routed_experts": True, "routed_experts_start_len": 4}
    async with engine_of(qwen3_moe, output_store=STORE) as engine:
        inline = await engine.generate(request_of("a", prompt(10, 1), **fields))
        stored = await engine.generate(
            request_of("b", prompt(10, 1), **fields, return_outputs_via_store=True)
        )
        assert engine.capabilities.output_store == "memory"
    assert inline.output_store_ref is None
    assert stored.outputs is None
    ref = stored.output_store_ref
    assert ref.fields["routed_experts"].codec == "experts"
    assert ref.fields["routed_experts"].start_row == 4
    (stash,) = store.read_many([(ref, ["routed_experts"])], stash_type=TokenOutputStash, buffer_bytes=1 << 20)
    np.testing.assert_array_equal(stash.routed_experts, inline.outputs.routed_experts)
    store.delete_many([ref])
    assert list(store.list_objects()) == []


@pytest.mark.parametrize("start", [0, 5])
async def test_rows_are_copied_once_from_the_slot_to_the_store(
    start, qwen3_moe, engine_of, prompt, request_of, store, monkeypatch
):
    read: list[np.ndarray] = []
    put: list[TokenOutputStash] = []
    slots: list[np.ndarray] = []
    read_rows, put_many = RowCapture.read, OutputStore.put_many

    def spy_read(capture, *args):
        slots.append(capture.slots.slots.numpy())
        read.append(read_rows(capture, *args))
        return read[-1]

    def spy_put(store, stashes, **kwargs):
        put.extend(stashes)
        return put_many(store, stashes, **kwargs)

    monkeypatch.setattr(RowCapture, "read", spy_read)
    monkeypatch.setattr(OutputStore, "put_many", spy_put)
    async with engine_of(qwen3_moe, output_store=STORE) as engine:
        request = request_of(
            "a",
            prompt(10, 1),
            max_new_tokens=8,
            return_routed_experts=True,
            return_outputs_via_store=True,
            routed_experts_start_len=start,
        )
        await engine.generate(request)
    (rows,), (stash,) = read, put
    assert stash.routed_experts is rows
    assert rows.shape[0] == 10 + 8 - 1 - start
    # The slot may be overwritten while the store encodes.
    assert not np.shares_memory(rows, slots[0])


async def test_cancelling_at_any_moment_leaves_no_object(qwen3_moe, engine_of, prompt, request_of, store):
    delays = np.random.default_rng(0).uniform(0.0, 0.08, 40)
    held: list[StoreRef] = []

    async def one(engine, i: int, delay: float) -> None:
        request = request_of(
            str(i),
            prompt(5 + i, i),
            max_new_tokens=1 + i % 7,
            return_routed_experts=True,
            return_outputs_via_store=True,
        )
        try:
            output = await asyncio.wait_for(engine.generate(request), delay)
        except TimeoutError:
            return
        held.append(output.output_store_ref)

    async with engine_of(qwen3_moe, output_store=STORE) as engine:
        await asyncio.gather(*[one(engine, i, delay) for i, delay in enumerate(delays)])
        stats = await engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_tokens_used) == (0, 0, 0)
    keys = {info.key for info in store.list_objects()}
    assert keys == {f"{ref.key}/routed_experts" for ref in held}
    assert len(held) < 40


async def test_abort_in_the_queue_stores_nothing(qwen3_moe, engine_of, prompt, request_of, store):
    async with engine_of(qwen3_moe, output_store=STORE) as engine:
        await engine.pause()
        request = request_of("a", prompt(5, 1), return_routed_experts=True, return_outputs_via_store=True)
        waiting = asyncio.create_task(engine.generate(request))
        while not (await engine.stats()).num_waiting:
            await asyncio.sleep(0)
        await engine.abort()
        output = await waiting
    assert output.output_store_ref is None
    assert output.outputs is None
    assert list(store.list_objects()) == []


async def test_unknown_backend_is_refused_at_start(qwen3_moe, engine_of):
    with pytest.raises((ConfigurationError, ValueError), match="nowhere"):
        async with engine_of(qwen3_moe, output_store={"backend": "nowhere"}):
            pass


async def test_a_start_that_is_cancelled_while_it_connects_closes_the_store(qwen3_moe, monkeypatch):
    connecting, may_connect = threading.Event(), threading.Event()
    made = []

    def slowly(config, model):
        connecting.set()
        assert may_connect.wait(10)
        made.append(build_writer(config, model))
        return made[0]

    monkeypatch.setattr(engine_module, "build_writer", slowly)
    engine = EmbeddedEngine(EmbeddedEngineSetup(output_store=OutputStoreConfig(**STORE)), model=qwen3_moe)
    start = asyncio.create_task(engine.start())
    await asyncio.to_thread(connecting.wait, 10)
    start.cancel()
    may_connect.set()

    with pytest.raises(asyncio.CancelledError):
        await start

    with pytest.raises(RuntimeError, match="writer is closed"):
        await made[0].write(TokenOutputStash(routed_experts=np.zeros((1, 1, 1), np.int32)), {})


async def test_a_full_store_delays_no_request_that_stores_nothing(qwen3_moe, engine_of, prompt, request_of):
    directory = Path("/dev/shm") / f"radix-test-{uuid.uuid4().hex}"
    config = {"directory": str(directory), "capacity_bytes": 1_000_000, "wait_s": 1.0}
    filler = create_backend("shared_memory", config)
    filler.put_batch([("output-store/filler", bytes(999_990))])
    fields = {"max_new_tokens": 4, "return_routed_experts": True}

    async def one(engine, name: str, stores: bool):
        began_s = time.monotonic()
        error = None
        try:
            await engine.generate(request_of(name, prompt(8, 1), **fields, return_outputs_via_store=stores))
        except StoreFullError as full:
            error = full
        return error, time.monotonic() - began_s

    try:
        store = {"backend": "shared_memory", "config": config}
        async with engine_of(qwen3_moe, output_store=store) as engine:
            storing = [asyncio.create_task(one(engine, str(i), True)) for i in range(48)]
            await asyncio.sleep(0.6)
            plain = await asyncio.gather(*(one(engine, f"plain-{i}", False) for i in range(4)))
            assert not any(task.done() for task in storing)
            stored = await asyncio.gather(*storing)
    finally:
        filler.close()
        shutil.rmtree(directory)
    assert [error for error, _ in plain] == [None] * 4
    assert all(isinstance(error, StoreFullError) for error, _ in stored)
    assert max(seconds for _, seconds in stored) < 3.0
