"""`run_until_interrupted`: an event loop whose Ctrl-C ends it between two callbacks."""

import asyncio
import signal
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

_T = TypeVar("_T")


def run_until_interrupted(main: Coroutine[Any, Any, _T]) -> _T:
    """`asyncio.run`, but the first SIGINT cancels `main` from the loop.

    The second raises KeyboardInterrupt at once.

    `asyncio.run` cancels within the signal handler: a signal that falls into the setting of a future's result
    makes that callback fail with InvalidStateError. Like it, this leaves alone a SIGINT handler that is not
    Python's default. Raises KeyboardInterrupt when `main` has ended by the cancellation.
    """
    interrupted = False

    async def cancellable() -> _T:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def on_sigint(_signal: int, _frame: FrameType | None) -> None:
            nonlocal interrupted
            if interrupted or task.done():
                raise KeyboardInterrupt
            interrupted = True
            loop.call_soon_threadsafe(task.cancel)

        signal.signal(signal.SIGINT, on_sigint)
        return await main

    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is not signal.default_int_handler:
        return asyncio.run(main)
    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, handler)
