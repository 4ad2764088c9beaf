"""The environment contract: problems to solve and a score for each answer."""

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from functools import lru_cache
from typing import Any

import msgspec


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    problem_id: str
    prompt_ids: tuple[int, ...]
    """Tokenized once, here; never again."""
    answer: Any
    """What `score` compares with."""


class Environment(ABC):
    """Deterministic given its configuration: problem i of a split is always the same."""

    @abstractmethod
    def train_problem(self, index: int) -> Problem:
        """Any index >= 0; a finite data set starts over in a new order each epoch."""

    @abstractmethod
    def eval_problems(self) -> list[Problem]:
        """Held out: none of them is a training problem."""

    @abstractmethod
    def score(self, problem: Problem, output_ids: tuple[int, ...], text: str) -> float | Awaitable[float]:
        """Reward of one answer, a finite number. `text` is the decoded output, without special tokens.

        Called in a thread, several at a time, see RewardConfig; `async def` works too, and runs on the event
        loop of the rollout.
        """


class EpochOrder:
    """The record at each position of an endless pass over `size` records.

    Every epoch holds each record once, in an order of its own.
    """

    def __init__(self, size: int, seed: int) -> None:
        if size <= 0:
            raise ValueError(f"size: expected at least one record, got {size!r}")
        self._size = size
        self._seed = seed
        # Two epochs at once: prefetching may cross the border.
        self._permutation = lru_cache(maxsize=2)(self._shuffled)

    def record(self, index: int) -> int:
        """Record number of position `index` >= 0."""
        epoch, position = divmod(index, self._size)
        return self._permutation(epoch)[position]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self._size))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
