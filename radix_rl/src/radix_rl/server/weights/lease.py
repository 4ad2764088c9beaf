"""`UpdateLease`: whose pause or weight update a server is in, and until when without a word of its owner."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from radix_rl.errors import EngineError, EngineStateError

logger = logging.getLogger(__name__)


class UpdateLease:
    """Nobody else can continue a server whose trainer was killed, so a pause ends by itself.

    Held by the client that pauses the server or begins an update, until the server is neither paused nor in
    one. Every call of the owner renews it; it does not run while one is in progress. When it runs out, the
    update is dropped and the server continues with the weights in force.
    """

    def __init__(
        self, lease_s: float, *, is_needed: Callable[[], bool], end: Callable[[], Awaitable[None]]
    ) -> None:
        """`is_needed`: whether clients have paused the server or begun an update. `end` undoes both."""
        self._lease_s = lease_s
        self._is_needed = is_needed
        self._end = end
        self._is_held = False
        self._owner: str | None = None
        self._calls = 0
        self._renewed = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    def describe(self) -> dict[str, object] | None:
        """What `/server_info` tells of it; None: nobody holds it."""
        if not self._is_held:
            return None
        return {"owner": self._owner, "ends_in_s": round(self._left_s(), 1)}

    @contextmanager
    def call(self, owner: str | None) -> Iterator[None]:
        """A call of `owner`. EngineStateError if the lease is another one's."""
        if self._is_held and self._owner is not None and owner != self._owner:
            raise EngineStateError(
                f"this server is in a weight update of {self._owner!r}, whose last call was "
                f"{time.monotonic() - self._renewed:.0f} s ago; wait {self._left_s():.0f} s, or end it with "
                '{"take_over": true} to /continue_generation'
            )
        self._calls += 1
        self._stop_timer()
        try:
            yield
        finally:
            self._calls -= 1
            self._renew(owner)

    def give_up(self) -> None:
        """Take it from its owner."""
        self._is_held, self._owner = False, None
        self._stop_timer()

    def _left_s(self) -> float:
        return self._lease_s if self._calls else max(0.0, self._renewed + self._lease_s - time.monotonic())

    def _renew(self, owner: str | None) -> None:
        self._renewed = time.monotonic()
        if not self._is_needed():
            self._is_held, self._owner = False, None
        elif not self._is_held:
            self._is_held, self._owner = True, owner
        self._stop_timer()
        if self._is_held and not self._calls:
            self._timer = asyncio.get_running_loop().call_later(self._lease_s, self._run_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run_out(self) -> None:
        logger.warning(
            "no call of %s for %g s: its weight update is dropped and generation continues",
            "the client that paused" if self._owner is None else repr(self._owner),
            self._lease_s,
        )
        self.give_up()
        self._ending = asyncio.get_running_loop().create_task(self._end_quietly())

    async def _end_quietly(self) -> None:
        try:
            await self._end()
        except EngineError as error:
            logger.error("the server could not continue after a pause that nobody ended: %s", error)
