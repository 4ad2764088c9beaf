"""`Inbox`: new requests on their way from event loops to the worker, in a fixed order."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from radix_rl.engines.embedded.schedule.sequence import Sequence as Request

Outcomes = list[Exception | None]
Submit = Callable[[Sequence[Request]], "Future[Outcomes]"]


class Inbox:
    """What tasks of an event loop submit in one of its turns reaches the worker as one call.

    So tasks that are started together, as by `asyncio.gather`, run in the order in which they were made,
    whatever the worker is doing meanwhile: the first of them does not begin a step of its own. Used from
    several event loops at once, each has its own order.
    """

    def __init__(self, submit: Submit) -> None:
        """`submit` hands requests to the worker: for each None, or why it is refused.

        It raises EngineDeadError if there is no worker any more.
        """
        self._submit = submit
        self._turns: dict[asyncio.AbstractEventLoop, list[tuple[Request, asyncio.Future[None]]]] = {}

    async def put(self, request: Request) -> None:
        """Returns when the worker has queued the request; raises why it is refused.

        A request whose `put` was cancelled may have reached the worker, or never will.
        """
        loop = asyncio.get_running_loop()
        queued: asyncio.Future[None] = loop.create_future()
        turn = self._turns.setdefault(loop, [])
        turn.append((request, queued))
        if len(turn) == 1:
            loop.call_soon(self._send, loop)
        await queued

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        turn = [(request, queued) for request, queued in self._turns.pop(loop) if not queued.done()]
        if not turn:
            return
        futures = [queued for _, queued in turn]
        try:
            submitted = self._submit([request for request, _ in turn])
        except Exception as error:
            _settle(futures, [error] * len(futures))
            return
        wrapped = asyncio.wrap_future(submitted, loop=loop)
        wrapped.add_done_callback(lambda ended: _settle(futures, _outcomes(ended, len(futures))))


def _outcomes(ended: "asyncio.Future[Outcomes]", count: int) -> Sequence[BaseException | None]:
    error = ended.exception()
    return ended.result() if error is None else [error] * count


def _settle(futures: Sequence["asyncio.Future[None]"], outcomes: Sequence[BaseException | None]) -> None:
    for future, error in zip(futures, outcomes, strict=True):
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
