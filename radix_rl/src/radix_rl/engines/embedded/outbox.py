"""`Outbox`: what the worker has to tell event loops, handed over once a step."""

import asyncio
import logging
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

Call = Callable[[], None]


class Outbox:
    """Used by the worker thread only.

    Waking a loop costs more than what it is told, and it would begin to work beside the step that goes on.
    """

    def __init__(self) -> None:
        self._calls: dict[asyncio.AbstractEventLoop, list[Call]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, call: Call) -> None:
        self._calls.setdefault(loop, []).append(call)

    def send(self) -> None:
        """To every loop all its calls, in order. A loop that was closed ends nobody else's requests."""
        if not self._calls:
            return
        calls, self._calls = self._calls, {}
        for loop, of_loop in calls.items():
            try:
                loop.call_soon_threadsafe(_run, of_loop)
            except RuntimeError:
                logger.warning(
                    "an event loop was closed before the engine could tell it of %d tokens or ends",
                    len(of_loop),
                )


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
