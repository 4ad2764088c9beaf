"""Waiting returns when the condition holds, and names what did not happen."""

import asyncio
import threading

import pytest

from radix_rl.testing import wait_for, wait_until


def test_waiting_ends_when_another_thread_is_done():
    done = threading.Event()
    threading.Timer(0.05, done.set).start()

    wait_until(done.is_set, "the thread is done")

    assert done.is_set()


async def test_waiting_lets_the_event_loop_go_on():
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, done.set)

    await wait_for(done.is_set, "the timer rang")

    assert done.is_set()


async def test_a_condition_that_never_holds_is_named():
    with pytest.raises(TimeoutError, match=r"the moon is full: not within 0\.02 s"):
        wait_until(lambda: False, "the moon is full", within_s=0.02)
    with pytest.raises(TimeoutError, match="the moon is full"):
        await wait_for(lambda: False, "the moon is full", within_s=0.02)
