"""Notices within seconds that a server died while its answers are awaited."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from radix_rl.errors import EngineDeadError

T = TypeVar("T")


class LivenessWatch:
    """Watches a server while at least one call is guarded.

    After `max_failures` failed probes in a row every guard gives up.
    """

    def __init__(
        self, probe: Callable[[], Awaitable[None]], *, interval_s: float = 2.0, max_failures: int = 3
    ) -> None:
        """`probe` raises what it likes when the server does not answer in time."""
        self._probe = probe
        self._interval_s = interval_s
        self._max_failures = max_failures
        self._guards: set[asyncio.Future[EngineDeadError]] = set()
        self._watcher: asyncio.Task[None] | None = None

    async def guard(self, call: asyncio.Task[T]) -> T:
        """The call's result.

        Raises EngineDeadError once the probes give the server up; the call is the caller's to cancel, then
        and when the guard itself is cancelled.
        """
        dead: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        self._guards.add(dead)
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        try:
            waiting: set[asyncio.Future[Any]] = {call, dead}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise dead.result()
        finally:
            self._guards.discard(dead)
            if not self._guards and self._watcher is not None:
                self._watcher.cancel()
                self._watcher = None

    async def _watch(self) -> None:
        error = await self._first_failure()
        self._watcher = None
        for guard in self._guards:
            if not guard.done():
                guard.set_result(
                    EngineDeadError(f"gave the engine up after {self._max_failures} failed probes: {error}")
                )

    async def _first_failure(self) -> Exception:
        """Probe until the server has failed often enough in a row; the last probe's error."""
        failures = 0
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._probe()
                failures = 0
            except Exception as error:
                failures += 1
                if failures == self._max_failures:
                    return error
