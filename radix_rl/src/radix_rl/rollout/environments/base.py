"""The environment contract: problems to solve and a score for each answer."""

from abc import ABC, abstractmethod
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
    def score(self, problem: Problem, output_ids: tuple[int, ...], text: str) -> float:
        """Reward of one answer. `text` is the decoded output, without special tokens."""
