"""`Scorer`: rewards of answers, computed in threads beside generation, within a time limit."""

import asyncio
import inspect
import logging
import math
from numbers import Real
from typing import Any

import numpy as np

from radix_rl.concurrency import in_own_thread
from radix_rl.config.rollout import RewardConfig
from radix_rl.errors import RewardError
from radix_rl.rollout.environments.base import Environment, Problem
from radix_rl.rollout.sample import Sample

logger = logging.getLogger(__name__)

FAILED = "reward_error"
"""Key of a sample's metadata under which a failed score says what went wrong."""


class Scorer:
    """The rewards of one rollout or evaluation. One event loop uses it."""

    def __init__(self, environment: Environment, config: RewardConfig) -> None:
        self._environment = environment
        self._config = config
        self._workers = asyncio.Semaphore(config.max_concurrent)
        self._num_failed = 0

    async def score(self, problem: Problem, sample: Sample, text: str) -> None:
        """Set the sample's reward; 0 with an entry `FAILED` in its metadata where there is none.

        Raises RewardError when more scores failed than `rollout.rewards.max_failed` allows.
        """
        try:
            async with self._workers:
                value = await self._value(problem, tuple(sample.tokens[sample.prompt_tokens :]), text)
            sample.reward = _finite(value)
        except _FailedError as error:
            self._failed(problem, sample, error)

    async def _value(self, problem: Problem, output_ids: tuple[int, ...], text: str) -> Any:
        """What the environment answers. Raises _FailedError."""

        def call() -> tuple[Any, BaseException | None]:
            # As a value: some exceptions, such as StopIteration, do not pass through a future.
            try:
                return self._environment.score(problem, output_ids, text), None
            except BaseException as error:
                return None, error

        timeout_s = self._config.timeout_s
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                value, error = await in_own_thread(call)
                if error is not None:
                    raise _FailedError(f"it raised {error!r}") from error
                if inspect.isawaitable(value):
                    value = await _settled(value)
                return value
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise _FailedError(f"it took longer than {timeout_s:g} s (rollout.rewards.timeout_s)") from error

    def _failed(self, problem: Problem, sample: Sample, error: "_FailedError") -> None:
        message = f"the reward of problem {problem.problem_id}, sample {sample.name}, failed: {error}"
        self._num_failed += 1
        if self._num_failed > self._config.max_failed:
            raise RewardError(
                f"{message}; {self._num_failed} failed, more than the {self._config.max_failed} that "
                "rollout.rewards.max_failed allows in one rollout"
            ) from error
        logger.warning("%s; it counts as 0", message)
        sample.reward = 0.0
        sample.metadata[FAILED] = str(error)


class _FailedError(Exception):
    """A score that gave no reward; the message says how it ended."""


async def _settled(value: Any) -> Any:
    """The result of an environment's coroutine. Raises _FailedError for what it raises."""
    try:
        return await value
    except asyncio.CancelledError:
        raise
    except Exception as error:
        raise _FailedError(f"it raised {error!r}") from error


def _finite(value: Any) -> float:
    if isinstance(value, Real | np.bool_) and math.isfinite(value):
        return float(value)
    raise _FailedError(f"expected a finite number, got {value!r}")


def num_failed(samples: list[Sample]) -> int:
    """Samples whose reward failed."""
    return sum(FAILED in sample.metadata for sample in samples)
