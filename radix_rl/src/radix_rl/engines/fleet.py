"""Calls that go to every engine of a fleet."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from radix_rl.engines.base import Engine


async def on_all(engines: Sequence[Engine], call: Callable[[Engine], Awaitable[object]]) -> None:
    """Call every engine at once and wait for all; raises the first engine's error."""
    for error in await outcomes(engines, call):
        if error is not None:
            raise error


async def outcomes(
    engines: Sequence[Engine], call: Callable[[Engine], Awaitable[object]]
) -> list[BaseException | None]:
    """What became of the call on each engine: None, or its error. Waits for all of them."""
    results = await asyncio.gather(*(call(engine) for engine in engines), return_exceptions=True)
    return [result if isinstance(result, BaseException) else None for result in results]
