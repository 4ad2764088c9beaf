"""Calls that go to every engine of a fleet."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from radix_rl.concurrency import outcomes

EngineT = TypeVar("EngineT")


async def on_all(engines: Sequence[EngineT], call: Callable[[EngineT], Awaitable[object]]) -> None:
    """Call every engine at once and wait for all; raises the first engine's error."""
    for error in await outcomes_of(engines, call):
        if error is not None:
            raise error


async def outcomes_of(
    engines: Sequence[EngineT], call: Callable[[EngineT], Awaitable[object]]
) -> list[BaseException | None]:
    """What became of the call on each engine: None, or its error. Waits for all of them."""
    return await outcomes(call(engine) for engine in engines)
