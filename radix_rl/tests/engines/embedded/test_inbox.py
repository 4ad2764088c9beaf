"""What tasks of one turn of an event loop submit reaches the worker together, in the order they were made."""

import asyncio
from concurrent.futures import Future

import pytest

from radix_rl.engines.embedded.inbox import Inbox
from radix_rl.errors import EngineDeadError, RequestError


def inbox_of(calls, refuse=()):
    def submit(requests):
        calls.append(list(requests))
        future = Future()
        future.set_result([RequestError(f"{r} refused") if r in refuse else None for r in requests])
        return future

    return Inbox(submit)


async def test_tasks_of_one_turn_are_one_call_in_their_order():
    calls = []
    inbox = inbox_of(calls)
    await asyncio.gather(*(inbox.put(i) for i in range(50)))
    await asyncio.gather(*(inbox.put(i) for i in (7, 3)))
    assert calls == [list(range(50)), [7, 3]]


async def test_a_refused_request_refuses_no_other():
    calls = []
    inbox = inbox_of(calls, refuse={1})
    results = await asyncio.gather(*(inbox.put(i) for i in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [type(None), RequestError, type(None)]


async def test_a_put_that_was_cancelled_in_its_turn_never_reaches_the_worker():
    calls = []
    inbox = inbox_of(calls)
    first, second = (asyncio.ensure_future(inbox.put(i)) for i in range(2))
    asyncio.get_running_loop().call_soon(first.cancel)
    await asyncio.gather(first, second, return_exceptions=True)
    assert first.cancelled()
    assert calls == [[1]]


async def test_without_a_worker_every_put_says_so():
    def dead(requests):
        raise EngineDeadError("the engine is closed")

    inbox = Inbox(dead)
    results = await asyncio.gather(*(inbox.put(i) for i in range(2)), return_exceptions=True)
    assert [str(result) for result in results] == ["the engine is closed"] * 2
    with pytest.raises(EngineDeadError, match="closed"):
        await inbox.put(3)
