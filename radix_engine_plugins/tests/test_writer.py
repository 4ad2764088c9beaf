import asyncio
import contextlib
import random
import threading
import time

import numpy as np
import pytest

from radix_engine_plugins import put_queue
from radix_engine_plugins.writer import OutputStoreWriter
from radix_transfer_plugins import TokenOutputStash
from radix_transfer_plugins.codecs.narrow import NarrowCodec
from radix_transfer_plugins.errors import CodecError, StoreFullError, StoreUnavailableError


@pytest.fixture
def stash():
    return TokenOutputStash(routed_experts=np.zeros((1, 1, 2), np.int32))


@pytest.fixture
async def writer(gated_store):
    writer = OutputStoreWriter(gated_store, max_concurrent_puts=2)
    yield writer
    gated_store.gate.set()
    await writer.close()


@pytest.fixture
def one_put_a_turn(monkeypatch):
    """As with stashes of a megabyte and more."""
    monkeypatch.setattr(put_queue, "TOGETHER_BYTES", 1)


async def _put_started(store):
    assert await asyncio.to_thread(store.put_started.acquire, timeout=10)


async def test_a_written_object_belongs_to_the_caller_until_discarded(writer, gated_store, stash):
    ref = await writer.write(stash, {"routed_experts": 3})
    assert gated_store.objects == {ref.key}
    assert ref.fields["routed_experts"].start_row == 3

    writer.discard([ref])
    await writer.close()

    assert gated_store.objects == set()
    assert gated_store.closed
    assert writer.metrics.puts._value.get() == 1
    assert writer.metrics.put_bytes._value.get() == 8
    assert writer.metrics.discards._value.get() == 1


async def test_puts_are_bounded_and_the_event_loop_stays_free(writer, gated_store, stash, one_put_a_turn):
    gated_store.gate.clear()
    writes = [asyncio.create_task(writer.write(stash)) for _ in range(10)]
    await _put_started(gated_store)
    await _put_started(gated_store)
    await asyncio.sleep(0.05)
    assert gated_store.num_puts == 2
    assert writer.metrics.pending_puts._value.get() == 10

    gated_store.gate.set()
    refs = await asyncio.gather(*writes)

    assert gated_store.most_running == 2
    assert gated_store.objects == {ref.key for ref in refs}
    assert len(gated_store.objects) == 10
    assert writer.metrics.pending_puts._value.get() == 0


async def test_a_failed_put_raises_and_is_counted(writer, gated_store, stash):
    gated_store.put_error = StoreFullError("needs 8 bytes, 0 free")
    with pytest.raises(StoreFullError, match="needs 8 bytes"):
        await writer.write(stash)

    gated_store.put_error = None
    await writer.write(stash)
    assert writer.metrics.put_failures._value.get() == 1
    assert writer.metrics.puts._value.get() == 1


async def test_what_waits_is_put_together(writer, gated_store, stash):
    gated_store.gate.clear()
    first = asyncio.create_task(writer.write(stash))
    second = asyncio.create_task(writer.write(stash, {"routed_experts": 1}))
    await _put_started(gated_store)
    rest = [asyncio.create_task(writer.write(stash, {"routed_experts": i})) for i in range(2, 40)]
    cancelled = asyncio.create_task(writer.write(stash))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    gated_store.gate.set()
    refs = await asyncio.gather(first, second, *rest)
    await writer.close()

    assert gated_store.num_puts < 10
    assert [ref.fields["routed_experts"].start_row for ref in refs] == list(range(40))
    assert gated_store.objects == {ref.key for ref in refs}
    assert writer.metrics.puts._value.get() == 40
    assert writer.metrics.pending_puts._value.get() == 0


async def test_large_stashes_are_put_by_all_threads(writer, gated_store):
    large = TokenOutputStash(routed_experts=np.zeros((1 << 17, 1, 2), np.int32))
    gated_store.gate.clear()
    writes = [asyncio.create_task(writer.write(large)) for _ in range(4)]
    for _ in range(2):
        await _put_started(gated_store)
    gated_store.gate.set()
    await asyncio.gather(*writes)
    assert gated_store.most_running == 2
    assert gated_store.num_puts == 4


async def test_one_that_the_store_refuses_fails_alone(writer, gated_store, stash):
    gated_store._codecs["routed_experts"] = NarrowCodec(8)
    bad = TokenOutputStash(routed_experts=np.full((1, 1, 2), 9, np.int32))
    gated_store.gate.clear()
    writes = [asyncio.create_task(writer.write(bad if i == 7 else stash)) for i in range(20)]
    await _put_started(gated_store)
    gated_store.gate.set()
    results = await asyncio.gather(*writes, return_exceptions=True)
    await writer.close()

    assert [i for i, result in enumerate(results) if isinstance(result, CodecError)] == [7]
    assert gated_store.objects == {ref.key for i, ref in enumerate(results) if i != 7}
    assert writer.metrics.put_failures._value.get() == 1
    assert writer.metrics.puts._value.get() == 19
    assert writer.metrics.pending_puts._value.get() == 0


async def test_a_store_that_is_down_is_asked_once_for_all_that_wait(writer, gated_store, stash):
    gated_store.put_error = StoreUnavailableError("down")
    gated_store.gate.clear()
    writes = [asyncio.create_task(writer.write(stash)) for _ in range(20)]
    await _put_started(gated_store)
    gated_store.gate.set()
    results = await asyncio.gather(*writes, return_exceptions=True)

    assert all(isinstance(result, StoreUnavailableError) for result in results)
    assert gated_store.num_puts < 10
    assert writer.metrics.put_failures._value.get() == 20


async def test_cancelled_while_each_is_put_again_alone_nothing_is_left(
    writer, gated_store, stash, monkeypatch
):
    put_many = gated_store.put_many

    def refuse_company(stashes, **options):
        if len(stashes) > 1:
            raise StoreFullError("needs 16 bytes, 8 free")
        return put_many(stashes, **options)

    monkeypatch.setattr(gated_store, "put_many", refuse_company)
    gated_store.gate.clear()
    writes = [asyncio.create_task(writer.write(stash)) for _ in range(8)]
    for _ in range(2):
        await _put_started(gated_store)
    for write in writes[:4]:
        write.cancel()
    gated_store.gate.set()
    results = await asyncio.gather(*writes, return_exceptions=True)
    await writer.close()
    assert gated_store.objects == {ref.key for ref in results[4:]}
    assert writer.metrics.pending_puts._value.get() == 0


async def test_what_is_no_stash_fails_alone_and_hangs_nobody(writer, gated_store, stash):
    gated_store.gate.clear()
    writes = [asyncio.create_task(writer.write(object() if i == 2 else stash)) for i in range(5)]
    await _put_started(gated_store)
    gated_store.gate.set()
    async with asyncio.timeout(10):
        results = await asyncio.gather(*writes, return_exceptions=True)
    assert [i for i, result in enumerate(results) if isinstance(result, CodecError)] == [2]
    assert writer.metrics.pending_puts._value.get() == 0


async def test_a_metric_that_fails_hangs_nobody_and_loses_nothing(
    writer, gated_store, stash, monkeypatch, caplog
):
    def disk_full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(writer.metrics.puts, "inc", disk_full)
    async with asyncio.timeout(10):
        ref = await writer.write(stash)
    assert gated_store.objects == {ref.key}
    assert "no space left" in caplog.text


async def test_a_small_one_does_not_wait_for_a_large_one_behind_it(writer, gated_store, stash):
    large = TokenOutputStash(routed_experts=np.zeros((1 << 18, 1, 2), np.int32))
    gated_store.gate.clear()
    blocking = [asyncio.create_task(writer.write(large)) for _ in range(2)]
    for _ in range(2):
        await _put_started(gated_store)
    sizes: list[int] = []
    put_many = gated_store.put_many
    gated_store.put_many = lambda stashes, **options: (
        sizes.append(len(stashes)) or put_many(stashes, **options)
    )
    rest = [asyncio.create_task(writer.write(each)) for each in (stash, stash, large, stash)]
    await asyncio.sleep(0)
    gated_store.gate.set()
    await asyncio.gather(*blocking, *rest)
    assert sorted(sizes) == [1, 1, 2]


async def test_after_a_wait_for_room_nobody_waits_for_the_room_of_others(
    writer, gated_store, stash, monkeypatch
):
    sizes: list[int] = []
    put_many = gated_store.put_many

    def refuse_many(stashes, **options):
        sizes.append(len(stashes))
        if len(stashes) > 2:
            time.sleep(0.4)
            raise StoreFullError("no room after 0.4 s")
        return put_many(stashes, **options)

    monkeypatch.setattr(gated_store, "put_many", refuse_many)
    monkeypatch.setattr(put_queue, "TOGETHER_PUTS", 8)
    for _ in range(3):
        await asyncio.gather(*[writer.write(stash) for _ in range(20)])
    # Two threads may have waited with a group each when the first of them found out.
    assert sum(size > 2 for size in sizes) <= 3
    assert len(gated_store.objects) == 60


async def test_a_thread_that_cannot_start_leaves_nothing_behind(gated_store, stash, monkeypatch):
    writer = OutputStoreWriter(gated_store)

    def no_thread(_self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await writer.write(stash)
    ref = await writer.write(stash)
    assert gated_store.objects == {ref.key}
    assert writer.metrics.pending_puts._value.get() == 0
    await writer.close()


async def test_cancelled_with_its_result_on_the_way_while_the_writer_closes_nothing_is_left(
    writer, gated_store, stash
):
    gated_store.gate.clear()
    write = asyncio.create_task(writer.write(stash))
    await _put_started(gated_store)
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0.02)
    gated_store.gate.set()
    while not gated_store.objects or gated_store.running:
        time.sleep(0.001)
    write.cancel()
    with pytest.raises(asyncio.CancelledError):
        await write
    await closing
    assert gated_store.objects == set()


async def test_cancelled_before_its_turn_it_never_starts(writer, gated_store, stash, one_put_a_turn):
    gated_store.gate.clear()
    running = [asyncio.create_task(writer.write(stash)) for _ in range(2)]
    await _put_started(gated_store)
    await _put_started(gated_store)
    waiting = asyncio.create_task(writer.write(stash))
    await asyncio.sleep(0)

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gated_store.gate.set()
    refs = await asyncio.gather(*running)
    await writer.close()

    assert gated_store.num_puts == 2
    assert gated_store.objects == {ref.key for ref in refs}


async def test_cancelled_during_the_put_nothing_is_left(writer, gated_store, stash):
    gated_store.gate.clear()
    write = asyncio.create_task(writer.write(stash))
    await _put_started(gated_store)

    write.cancel()
    with pytest.raises(asyncio.CancelledError):
        await write
    gated_store.gate.set()
    await writer.close()

    assert gated_store.num_puts == 1
    assert gated_store.objects == set()


async def test_cancelled_after_the_put_but_before_delivery_nothing_is_left(writer, gated_store, stash):
    gated_store.gate.clear()
    write = asyncio.create_task(writer.write(stash))
    await _put_started(gated_store)
    gated_store.gate.set()
    while not gated_store.objects:
        # Blocks the loop on purpose: the put ends while its result cannot be delivered.
        time.sleep(0.001)
    write.cancel()
    with pytest.raises(asyncio.CancelledError):
        await write
    await writer.close()

    assert gated_store.objects == set()


async def test_cancelled_with_its_result_already_on_the_way_nothing_is_left(writer, gated_store, stash):
    write = asyncio.create_task(writer.write(stash))
    await asyncio.sleep(0)
    while not gated_store.objects or gated_store.running:
        time.sleep(0.001)
    time.sleep(0.02)
    # One pass of the loop sets the asyncio future and schedules the task's wake-up; cancelling then
    # hits the gap.
    asyncio.get_running_loop().call_soon(write.cancel)
    with pytest.raises(asyncio.CancelledError):
        await write
    await writer.close()

    assert gated_store.objects == set()


async def test_cancellation_at_random_moments_leaves_exactly_what_was_returned(writer, gated_store, stash):
    chance = random.Random(5)
    returned = set()

    async def client() -> None:
        write = asyncio.create_task(writer.write(stash))
        for _ in range(chance.randrange(6)):
            await asyncio.sleep(0)
        if chance.random() < 0.3:
            await asyncio.sleep(chance.random() * 0.01)
        write.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            returned.add((await write).key)

    for _ in range(30):
        await asyncio.gather(*(client() for _ in range(20)))
    await writer.close()

    assert gated_store.objects == returned
    assert 0 < len(returned) < 600


def test_a_write_whose_event_loop_goes_away_leaves_nothing(gated_store, stash):
    writer = OutputStoreWriter(gated_store)
    gated_store.gate.clear()

    async def abandon() -> None:
        task = asyncio.create_task(writer.write(stash))
        await _put_started(gated_store)
        assert not task.done()

    asyncio.run(abandon())
    gated_store.gate.set()
    asyncio.run(writer.close())

    assert gated_store.num_puts == 1
    assert gated_store.objects == set()


def test_several_event_loops_share_one_writer(gated_store, stash):
    writer = OutputStoreWriter(gated_store, max_concurrent_puts=3)
    refs = []

    async def write_some() -> None:
        refs.extend(await asyncio.gather(*(writer.write(stash) for _ in range(20))))

    threads = [threading.Thread(target=asyncio.run, args=(write_some(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(writer.close())

    assert len(refs) == 60
    assert gated_store.objects == {ref.key for ref in refs}


async def test_a_failed_delete_is_counted_and_does_not_stop_the_next(writer, gated_store, stash, caplog):
    first, second = await writer.write(stash), await writer.write(stash)
    gated_store.delete_error = ConnectionError("store is down")
    writer.discard([first])
    while writer.metrics.discard_failures._value.get() == 0:
        await asyncio.sleep(0.001)
    gated_store.delete_error = None
    writer.discard([second])
    await writer.close()

    assert gated_store.objects == {first.key}
    assert first.key in caplog.text


async def test_discard_does_not_wait_behind_a_put_that_waits_for_room(writer, gated_store, stash):
    ref = await writer.write(stash)
    gated_store.gate.clear()
    stuck = [asyncio.create_task(writer.write(stash)) for _ in range(3)]
    await _put_started(gated_store)
    writer.discard([ref])

    async with asyncio.timeout(5):
        while gated_store.objects:
            await asyncio.sleep(0.001)
    gated_store.gate.set()
    await asyncio.gather(*stuck)


async def test_close_waits_for_puts_and_refuses_new_ones(writer, gated_store, stash):
    gated_store.gate.clear()
    write = asyncio.create_task(writer.write(stash))
    await _put_started(gated_store)
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    assert not gated_store.closed

    gated_store.gate.set()
    await closing
    assert (await write).key in gated_store.objects
    assert gated_store.closed
    with pytest.raises(RuntimeError, match="closed"):
        await writer.write(stash)
    assert writer.metrics.pending_puts._value.get() == 0
    await writer.close()


def test_a_bound_of_no_puts_is_refused(gated_store):
    with pytest.raises(ValueError, match="max_concurrent_puts: expected 1 or more, got 0"):
        OutputStoreWriter(gated_store, max_concurrent_puts=0)
