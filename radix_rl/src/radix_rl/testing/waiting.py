"""Waiting for a condition in tests, with a deadline that names what did not happen."""

import asyncio
import time
from collections.abc import Callable

_EVERY_S = 0.01


def wait_until(holds: Callable[[], object], what: str, *, within_s: float = 20.0) -> None:
    """Block this thread until `holds()` is true. Raises TimeoutError naming `what`."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not within {within_s:g} s")
        time.sleep(_EVERY_S)


async def wait_for(holds: Callable[[], object], what: str, *, within_s: float = 20.0) -> None:
    """Wait on the event loop until `holds()` is true. Raises TimeoutError naming `what`."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not within {within_s:g} s")
        await asyncio.sleep(_EVERY_S)
