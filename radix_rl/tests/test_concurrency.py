"""What is waited for ends, and what is cancelled has ended."""

import asyncio
import threading
import time

import pytest

from radix_rl.concurrency import (
    cancel_and_wait,
    gather_or_cancel,
    in_own_thread,
    in_thread_to_end,
    outcomes,
    to_end,
)


async def test_clean_up_runs_to_its_end_however_often_its_task_is_cancelled():
    done: list[str] = []

    def slow(word: str) -> str:
        time.sleep(0.1)
        done.append(word)
        return word

    assert await in_thread_to_end(slow, "first") == "first"
    task = asyncio.create_task(in_thread_to_end(slow, "second"))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["first", "second"]
    with pytest.raises(ZeroDivisionError):
        await in_thread_to_end(lambda: 1 // 0)


async def test_a_coroutine_runs_to_its_end_although_its_task_is_cancelled(caplog):
    ended = []

    async def clean_up():
        await asyncio.sleep(0.05)
        ended.append(True)
        raise ZeroDivisionError("too late")

    task = asyncio.create_task(to_end(clean_up()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert ended == [True]
    assert "clean_up, whose caller was cancelled, failed: too late" in caplog.text


async def test_a_cancelled_caller_does_not_wait_for_a_thread_of_its_own():
    free = threading.Event()
    task = asyncio.create_task(in_own_thread(lambda: free.wait(30)))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < 5
    free.set()


async def test_an_own_thread_hands_back_results_and_errors():
    assert await in_own_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_own_thread(lambda: 1 // 0)


async def test_outcomes_are_in_order_and_one_failure_stops_no_other():
    async def call(seconds, error):
        await asyncio.sleep(seconds)
        if error:
            raise error
        ended.append(seconds)

    ended = []
    failure = ValueError("second")
    assert await outcomes([call(0.02, None), call(0, failure), call(0.01, None)]) == [None, failure, None]
    assert ended == [0.01, 0.02]


async def test_the_first_failure_ends_the_others_before_it_is_raised():
    ended = []

    async def other():
        try:
            await asyncio.sleep(30)
        finally:
            ended.append("other")

    async def failing():
        await asyncio.sleep(0.01)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await gather_or_cancel([other(), failing()])
    assert ended == ["other"]


async def test_cancelled_tasks_have_ended_and_finished_ones_keep_their_results():
    finished = asyncio.create_task(asyncio.sleep(0, "result"))
    await finished
    running = asyncio.create_task(asyncio.sleep(30))

    await cancel_and_wait([finished, running])

    assert finished.result() == "result"
    assert running.cancelled()
