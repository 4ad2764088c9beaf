"""Trying again, with a deadline: connection errors and 5xx, never anything else."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from radix_rl.errors import EngineDeadError, EngineError, EngineStateError, WeightUpdateError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    max_tries: int = 5
    deadline_s: float = 600.0
    """For all tries of one call together."""
    first_backoff_s: float = 0.1
    max_backoff_s: float = 2.0


async def with_retries(policy: RetryPolicy, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
    """The result of the first try that succeeds. `what` names the call in errors.

    Raises the last try's EngineError, EngineDeadError at the deadline, and at once any error that no retry
    can mend.
    """
    ends = time.monotonic() + policy.deadline_s
    backoff_s = policy.first_backoff_s
    for tries_left in reversed(range(policy.max_tries)):
        deadline = asyncio.timeout(ends - time.monotonic())
        try:
            async with deadline:
                return await attempt()
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise EngineDeadError(f"{what} did not answer within {policy.deadline_s:g} s") from error
        except (EngineStateError, WeightUpdateError):
            raise
        except EngineError as error:
            if not tries_left or time.monotonic() + backoff_s > ends:
                raise
            logger.info("%s; trying again in %.1f s", error, backoff_s)
        await asyncio.sleep(backoff_s)
        backoff_s = min(2 * backoff_s, policy.max_backoff_s)
    raise AssertionError("max_tries is at least 1")
