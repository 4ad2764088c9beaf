"""Nothing in the store path holds the event loop for more than 2 ms."""

import asyncio
import threading
import time

import numpy as np
import pytest

from radix_engine_plugins.codecs import store_codecs
from radix_engine_plugins.sglang.outputs import MaskChunk, RequestOutputs
from radix_engine_plugins.sglang.wire import pack_rows
from radix_engine_plugins.vllm.outputs import TakenOutputs
from radix_engine_plugins.vllm.session import StoreSession
from radix_engine_plugins.writer import OutputStoreWriter
from radix_transfer_plugins import OutputStore, create_backend

BOUND_S = 0.002
TOKENS, LAYERS, TOP_K = 65536, 48, 8
"""101 MB of int32; to encode them takes several times the bound on any machine."""


class MeasuredLoop(asyncio.SelectorEventLoop):
    """Knows the CPU time of its thread in its longest callback: what a busy machine adds does not count."""

    longest_s = 0.0

    def call_soon(self, callback, *args, context=None):
        def measured(*args):
            started_s = time.thread_time()
            try:
                return callback(*args)
            finally:
                self.longest_s = max(self.longest_s, time.thread_time() - started_s)

        return super().call_soon(measured, *args, context=context)


@pytest.fixture
def rows():
    return np.random.default_rng(0).integers(0, 128, (TOKENS, LAYERS, TOP_K), np.int32)


class Config:
    num_experts = 128


@pytest.fixture
def writer(tmp_path):
    """On a store in which every put takes a while."""
    backend = create_backend("shared_memory", {"directory": str(tmp_path), "key_prefix": "test/run"})
    put_batch = backend.put_batch

    def slow(items, **options):
        time.sleep(0.2)
        put_batch(items, **options)

    backend.put_batch = slow
    writer = OutputStoreWriter(OutputStore(backend, codecs=store_codecs(Config)))
    yield writer
    asyncio.run(writer.close())


def longest_step_s(coroutine_function) -> float:
    loop = MeasuredLoop()
    try:
        loop.run_until_complete(coroutine_function())
    finally:
        loop.close()
    return loop.longest_s


def test_the_measuring_loop_sees_work(rows):
    codec = store_codecs(Config)["routed_experts"]

    async def encode_here():
        codec.encode(rows, 0)

    assert longest_step_s(encode_here) > BOUND_S


def test_rows_and_masks_of_sglang_are_joined_encoded_and_put_off_the_loop(rows, writer):
    codec = store_codecs(Config)["routed_experts"]
    outputs = RequestOutputs(rows={"routed_experts": pack_rows(codec, "routed_experts", rows, 0)})
    lengths = np.full(16, 512, np.int32)
    chunk = MaskChunk(lengths, np.arange(8192, dtype=np.int32), np.zeros(8192, np.float32))
    outputs.masks = [chunk] * 100

    async def store():
        stash, start_rows = await asyncio.to_thread(outputs.to_stash, codec, "support")
        ref = await writer.write(stash, start_rows)
        assert ref.fields["routed_experts"].shape == rows.shape

    assert longest_step_s(store) < BOUND_S


def test_rows_of_vllm_are_joined_widened_and_put_off_the_loop(rows, writer):
    session = StoreSession.__new__(StoreSession)
    session.writer = writer
    session.routing_layers = range(1, LAYERS)
    session.captures_sampling_mask = False
    chunks = list(rows.astype(np.uint8).reshape(64, -1, LAYERS, TOP_K))
    taken = TakenOutputs(num_tokens=TOKENS + 1, num_output_tokens=1, start_row=0, rows=chunks)

    async def store():
        ref = await session.put(taken)
        assert ref.fields["routed_experts"].shape == rows.shape

    assert longest_step_s(store) < BOUND_S


def test_many_puts_at_once_leave_the_loop_free(rows, writer):
    """Also while all threads are taken: those that wait hold a future and nothing else."""
    stash, _ = RequestOutputs().to_stash(store_codecs(Config)["routed_experts"], "support")
    ticks, done = [], threading.Event()

    async def store():
        async def tick():
            while not done.is_set():
                ticks.append(time.monotonic())
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        await asyncio.gather(*(writer.write(stash) for _ in range(16)))
        done.set()
        await ticking

    assert longest_step_s(store) < BOUND_S
    # 16 puts of 0.2 s on 4 threads take 0.8 s, in which a blocked loop would tick a handful of times.
    assert len(ticks) > 100
