"""Word problems with sums of two numbers, generated as needed."""

import random
import re
from typing import Protocol

import msgspec

from radix_rl.config.environment import ArithmeticEnvironmentConfig
from radix_rl.rollout.environments.base import Environment, Problem

NAMES = ("Tom", "Ann", "Ben", "Mia", "Leo", "Eva", "Sam", "Zoe", "Max", "Ida")
THINGS = ("apples", "books", "coins", "pens", "shells", "stones", "cards", "eggs")
STORIES = (
    "{a} has {x} {t} . {b} gives {a} {y} more . How many {t} does {a} have ?",
    "{a} finds {x} {t} and {b} finds {y} {t} . How many {t} do they have ?",
    "There are {x} {t} in a box . {a} puts {y} more in . How many {t} are in the box ?",
    "{a} buys {x} {t} on Monday and {y} on Friday . How many {t} did {a} buy ?",
    "{a} sold {y} {t} and now has {x} . How many {t} did {a} have before ?",
)
"""Words stand apart, so that a tokenizer of whole words can be made of them."""

HELD_OUT_SHARE = 8
"""One pair of operands in so many is kept for evaluation, whatever the story around it."""

_FINAL_NUMBER = re.compile(r"(\d(?: ?\d)*) *$")


class TextTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def encode(self, text: str) -> list[int]: ...


class Sum(msgspec.Struct, frozen=True):
    """A story and its operands."""

    text: str
    x: int
    y: int

    @property
    def needs_carry(self) -> bool:
        return self.x % 10 + self.y % 10 >= 10


class ArithmeticEnvironment(Environment):
    """Reward 1 if the number that an answer ends with is the sum; else 0.

    Digits may stand apart ("8 2" is 82): tokenizers that split numbers often decode so.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        max_operand: int = 99,
        carry_share: float | None = None,
        num_eval_problems: int = 256,
        seed: int = 0,
    ) -> None:
        """Operands lie in [10, max_operand].

        `carry_share`: share of problems whose last digits add up to 10 or more; None: as they come. `seed`
        orders the training problems; the held-out ones are the same for all seeds.
        """
        self._tokenizer = tokenizer
        self._max_operand = max_operand
        self._carry_share = carry_share
        self._num_eval_problems = num_eval_problems
        self._seed = seed

    def train_problem(self, index: int) -> Problem:
        return self._problem(f"train-{index}", self.train_sum(index))

    def eval_problems(self) -> list[Problem]:
        return [
            self._problem(f"eval-{index}", self._draw(f"eval/{index}", held_out=True))
            for index in range(self._num_eval_problems)
        ]

    def score(self, problem: Problem, output_ids: tuple[int, ...], text: str) -> float:
        return float(final_number(text) == problem.answer)

    def train_sum(self, index: int) -> Sum:
        """The story behind a training problem, for whoever writes worked answers to it."""
        return self._draw(f"{self._seed}/{index}", held_out=False)

    def _draw(self, path: str, *, held_out: bool) -> Sum:
        rng = random.Random(path)
        carry = None if self._carry_share is None else rng.random() < self._carry_share
        while True:
            x, y = rng.randint(10, self._max_operand), rng.randint(10, self._max_operand)
            if is_held_out(x, y) == held_out and carry in (None, x % 10 + y % 10 >= 10):
                break
        first, second = rng.sample(NAMES, 2)
        text = rng.choice(STORIES).format(a=first, b=second, t=rng.choice(THINGS), x=x, y=y)
        return Sum(text, x, y)

    def _problem(self, problem_id: str, drawn: Sum) -> Problem:
        prompt_ids = tuple(self._tokenizer.encode(drawn.text))
        return Problem(problem_id=problem_id, prompt_ids=prompt_ids, answer=drawn.x + drawn.y)


def create(config: ArithmeticEnvironmentConfig, tokenizer: TextTokenizer, seed: int) -> Environment:
    """The environment of these settings."""
    return ArithmeticEnvironment(tokenizer, **config.model_dump(exclude={"type"}), seed=seed)


def is_held_out(x: int, y: int) -> bool:
    """Whether these operands belong to evaluation."""
    return random.Random(f"{x}+{y}").randrange(HELD_OUT_SHARE) == 0


def final_number(text: str) -> int | None:
    """The number that `text` ends with; None: it ends with something else."""
    found = _FINAL_NUMBER.search(text)
    return int(found[1].replace(" ", "")) if found else None


def story_words() -> list[str]:
    """Every word that stories are made of, except their numbers, in a fixed order."""
    words = {word for story in STORIES for word in story.split() if not word.startswith("{")}
    return sorted(words | set(NAMES) | set(THINGS))
