import asyncio
import signal
import threading

import pytest

from radix_rl.train.interrupt import run_until_interrupted


@pytest.fixture(autouse=True)
def handled():
    """Whoever starts the tests in the background of a shell has them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_signal_cancels_from_the_loop_and_lets_it_clean_up():
    seen = []

    async def main():
        task = asyncio.current_task()
        waiter = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(strike, task)
        try:
            await waiter
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    def strike(task):
        signal.raise_signal(signal.SIGINT)
        seen.append(task.cancelling())

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted(main())
    assert seen == [0, "cleaned up"]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_signal_ends_a_loop_that_does_not_turn():
    seen = []

    async def main():
        signal.raise_signal(signal.SIGINT)
        seen.append("first")
        signal.raise_signal(signal.SIGINT)
        seen.append("second")

    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted(main())
    assert seen == ["first"]


def test_a_cancellation_of_its_own_is_none_of_the_keyboard():
    async def main():
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_until_interrupted(main())


@pytest.mark.parametrize("where", ["a handler of the caller's", "another thread"])
def test_elsewhere_signals_stay_with_their_owner(where):
    async def main():
        return signal.getsignal(signal.SIGINT)

    def own(*_):
        raise AssertionError

    before = signal.getsignal(signal.SIGINT)
    if where == "another thread":
        found = []
        thread = threading.Thread(target=lambda: found.append(run_until_interrupted(main())))
        thread.start()
        thread.join(10)
        assert found == [before]
        return
    signal.signal(signal.SIGINT, own)
    try:
        assert run_until_interrupted(main()) is own
    finally:
        signal.signal(signal.SIGINT, before)
