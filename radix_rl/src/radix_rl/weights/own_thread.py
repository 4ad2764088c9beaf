"""A blocking call on a thread of its own."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(function: Callable[[], T]) -> T:
    """What `function` returns or raises. Unlike one of the event loop's pool, the thread keeps neither the
    pool nor the end of the process waiting if its caller is cancelled: it is for calls that wait for other
    machines, and its result is then dropped."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        outcome: T | None = None
        error: BaseException | None = None
        try:
            outcome = function()
        except BaseException as raised:
            error = raised

        def settle() -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(outcome)  # type: ignore[arg-type]

        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:
            # The loop was closed: nobody waits any more.
            return

    threading.Thread(target=run, name="weights", daemon=True).start()
    return await future
