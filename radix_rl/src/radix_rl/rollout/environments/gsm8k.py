"""GSM8K: grade-school word problems whose answer is one number."""

import codecs
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from radix_rl.config.environment import Gsm8kEnvironmentConfig
from radix_rl.errors import ConfigurationError, DataError
from radix_rl.rollout.environments.base import Environment, EpochOrder, Problem

ANSWER_MARK = "####"
_THOUSANDS = r"(?:\{,\}|\\,|,\\!|,|\u00a0|\u202f)"
"""Between groups of three digits: a comma, also as LaTeX protects it, or a space that does not break."""
_NUMBER = re.compile(
    rf"""
    (?:(?<![\w.)\]}}])[-+\u2212])?                           # a sign, where it is no operator: not in 10-5
    \\?\$?                                                 # a dollar sign, also as LaTeX writes it
    (?:
        (?: [0-9]{{1,3}}(?:{_THOUSANDS}[0-9]{{3}})+(?![0-9])   # 1,200 and 1{{,}}200; 8,12 are two numbers
          | [0-9]+ )
        (?:\.[0-9]+)?
      | (?<!\w)\.[0-9]+                                      # .5
    )
    """,
    re.VERBOSE,
)


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...


class Record(msgspec.Struct, frozen=True):
    """One line of the data set; other keys are ignored."""

    question: str
    answer: str
    """The solution in words, then "#### " and the number."""


class Gsm8kEnvironment(Environment):
    """Reward 1 if the last number of the answer, or the one after "####", is the solution's; else 0."""

    def __init__(
        self,
        train: Iterable[Record],
        test: Iterable[Record],
        tokenizer: ChatTokenizer,
        *,
        system_prompt: str | None = None,
        seed: int = 0,
    ) -> None:
        """Each question is one user message of the chat template, after `system_prompt`.

        `seed` orders the epochs.
        """
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._train = list(train)
        self._test = list(test)
        self._order = EpochOrder(len(self._train), seed)

    def train_problem(self, index: int) -> Problem:
        record = self._order.record(index)
        return self._problem(f"train-{record}", self._train[record])

    def eval_problems(self) -> list[Problem]:
        return [self._problem(f"test-{number}", record) for number, record in enumerate(self._test)]

    def score(self, problem: Problem, output_ids: tuple[int, ...], text: str) -> float:
        return float(final_number(text) == problem.answer)

    def _problem(self, problem_id: str, record: Record) -> Problem:
        messages = [{"role": "user", "content": record.question}]
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        try:
            prompt_ids = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        except ValueError as error:
            raise ConfigurationError(
                f"model.path: questions need the tokenizer's chat template, which failed: {error}"
            ) from error
        return Problem(problem_id=problem_id, prompt_ids=tuple(prompt_ids), answer=solution_of(record))


def create(config: Gsm8kEnvironmentConfig, tokenizer: ChatTokenizer, seed: int) -> Environment:
    """The environment of these settings. Raises DataError for data that cannot be used."""
    return Gsm8kEnvironment(
        load_records(config, "train"),
        load_records(config, "test"),
        tokenizer,
        system_prompt=config.system_prompt,
        seed=seed,
    )


def load_records(config: Gsm8kEnvironmentConfig, split: Literal["train", "test"]) -> list[Record]:
    """A split from where the configuration says. Raises DataError."""
    path = config.train_path if split == "train" else config.test_path
    if path is not None:
        return read_records(path)
    assert config.hub_dataset is not None, "the configuration has paths or a hub data set"
    return read_hub_records(config.hub_dataset, split)


def read_records(path: Path) -> list[Record]:
    """A JSONL file. Raises DataError naming file and line of what cannot be used."""
    try:
        with path.open("rb") as file:
            if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
                file.seek(0)
            records = [
                _parse_line(path, number, line) for number, line in enumerate(file, start=1) if line.strip()
            ]
    except OSError as error:
        raise DataError(f"cannot read the data file {str(path)!r}: {error.strerror}") from error
    if not records:
        raise DataError(f"the data file {str(path)!r} has no records; expected at least one")
    return records


def read_hub_records(dataset: str, split: Literal["train", "test"]) -> list[Record]:
    """A split from the model hub, through the extra `hub`."""
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(
            "reading from the hub needs the datasets library: pip install 'radix-rl[hub]'"
        ) from error
    try:
        rows: Iterable[Mapping[str, Any]] = load_dataset(dataset, "main", split=split)
    except OSError as error:
        raise DataError(f"cannot load the split {split!r} of {dataset!r} from the hub: {error}") from error
    records = [Record(question=row["question"], answer=row["answer"]) for row in rows]
    for number, record in enumerate(records):
        if solution_of(record) is None:
            raise DataError(f"{dataset}, {split}, record {number}: no number after {ANSWER_MARK!r}")
    return records


def solution_of(record: Record) -> Decimal | None:
    """The number after the last "####"."""
    _, mark, tail = record.answer.rpartition(ANSWER_MARK)
    return _number(tail.strip()) if mark else None


def final_number(text: str) -> Decimal | None:
    """The number after the last "####" if there is one, else the last number of the text.

    After "####" it is the first number, or the result where an equation stands there: 5 in "#### 2 + 3 = 5".
    Thousands separators and "$" are dropped. Digits joined by commas that separate no thousands are several
    numbers: "8,12" ends in 12.
    """
    _, mark, tail = text.rpartition(ANSWER_MARK)
    if not mark:
        found = _NUMBER.findall(text)
        return _number(found[-1]) if found else None
    line = tail.strip().partition("\n")[0]
    found = _NUMBER.findall(line.rpartition("=")[2]) or _NUMBER.findall(line)
    return _number(found[0]) if found else None


def _number(text: str) -> Decimal | None:
    """The value of a text that is one number and nothing else."""
    if _NUMBER.fullmatch(text) is None:
        return None
    digits = re.sub(rf"{_THOUSANDS}|\\?\$", "", text).replace("\u2212", "-")
    return Decimal(digits)


def _parse_line(path: Path, number: int, line: bytes) -> Record:
    try:
        record = msgspec.json.decode(line, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f'{path}, line {number}: expected an object with "question" and "answer": {error}'
        ) from error
    if solution_of(record) is None:
        raise DataError(
            f"{path}, line {number}: the answer has no number after {ANSWER_MARK!r}: {record.answer[-80:]!r}"
        )
    return record
