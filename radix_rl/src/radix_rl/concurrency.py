"""Waiting for threads, coroutines and tasks: each way once, with when to use it.

| helper             | for                                                                                  |
|--------------------|--------------------------------------------------------------------------------------|
| `asyncio.to_thread`| work that ends by itself and that a cancelled caller may leave alone                 |
| `torch_in_thread`  | the same, when the work uses torch                                                   |
| `in_own_thread`    | waits for other machines, which must hold up neither other calls nor the process' end |
| `in_thread_to_end` | clean-up in a thread that must happen although the caller is cancelled               |
| `to_end`           | the same for a coroutine                                                             |
| `outcomes`         | one call on many things, where those that fail must not stop the others              |
| `gather_or_cancel` | several coroutines of which one failure makes the others pointless                   |
| `cancel_and_wait`  | ending tasks in a `finally`                                                          |
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from radix_rl.openmp_pool import pool_ended_after

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


async def torch_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function that uses torch in a thread of the event loop's pool.

    Those threads outlive the call, and would keep the pools that OpenMP made for them.
    """
    return await asyncio.to_thread(pool_ended_after()(function), *args, **kwargs)


async def in_own_thread(function: Callable[[], T]) -> T:
    """Run a blocking call on a thread of its own.

    Unlike one of the event loop's pool, the thread keeps neither the pool nor the end of the process waiting
    if its caller is cancelled; the call's result is then dropped.
    """
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

    threading.Thread(target=run, name="blocking-call", daemon=True).start()
    return await future


async def in_thread_to_end(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run clean-up off the event loop, to its end even if this coroutine is cancelled meanwhile.

    `asyncio.to_thread` alone drops a call that still waits for a thread when its task is cancelled, and
    with it the deletion of what nobody else knows of.
    """
    return await to_end(asyncio.to_thread(call, *args, **kwargs))


async def to_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that runs to its end even if this one is cancelled meanwhile.

    A cancellation is raised when the work has ended; an error of the work is then logged.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except BaseException:
            break
    if cancelled is not None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            logger.warning("%s, whose caller was cancelled, failed: %s", work.__qualname__, failure)
        raise cancelled
    return task.result()


async def outcomes(awaitables: Iterable[Awaitable[object]]) -> list[BaseException | None]:
    """What became of each: None, or its error. All run at once and are waited for."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    return [result if isinstance(result, BaseException) else None for result in results]


async def gather_or_cancel(coroutines: Sequence[Awaitable[T]]) -> list[T]:
    """Results in order. The first error cancels the others, waits until they have ended, and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await cancel_and_wait(tasks)
        raise


async def cancel_and_wait(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """End every task; results and errors of those that had ended are left in them."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
