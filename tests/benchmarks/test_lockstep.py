"""Cases in lockstep: every process takes its turns, every kind is done in every process, failures end all."""

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path

import pytest

from benchmarks.lockstep import BeforePass, _kind_of, in_lockstep, kinds_in_lockstep
from benchmarks.timing import Case, median_ratio

pytestmark = pytest.mark.timeout(120)


@contextmanager
def busy(seconds_per_pass: float, log: Path, name: str, before_pass: BeforePass) -> Iterator[Case]:
    """Sixteen passes that each use so much CPU time, and note their names as they begin."""

    def case() -> None:
        for _ in range(16):
            before_pass()
            with log.open("a") as lines:
                lines.write(f"{name}\n")
            end = time.process_time() + seconds_per_pass
            while time.process_time() < end:
                pass

    yield case


@contextmanager
def failing(before_pass: BeforePass) -> Iterator[Case]:
    """In its eighth pass, when the others wait for their turn."""

    def case() -> None:
        for _ in range(8):
            before_pass()
        raise ValueError("this case cannot be run")

    yield case


@contextmanager
def noting(log: Path, before_pass: BeforePass) -> Iterator:
    """A case of kinds that notes which process does what."""
    place = multiprocessing.current_process().name

    def case(kind: str) -> None:
        before_pass()
        with log.open("a") as lines:
            lines.write(f"{place} {kind}\n")
        end = time.process_time() + {"short": 0.02, "middle": 0.04, "long": 0.08}[kind]
        while time.process_time() < end:
            pass

    yield case


def test_cases_take_turns_and_each_is_measured_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    makers = {"short": partial(busy, 0.002, log, "short"), "long": partial(busy, 0.008, log, "long")}
    seconds = in_lockstep(makers, repetitions=3, warm_up=False)
    assert [len(values) for values in seconds.values()] == [3, 3]
    assert 2.5 < median_ratio(seconds["long"], seconds["short"]) < 5
    names = log.read_text().split()
    assert len(names) == 2 * 3 * 16
    # Three passes, then four of the other case, and so on: the turn is passed on before every fourth.
    assert names[:11] == ["short"] * 3 + ["long"] * 3 + ["short"] * 4 + ["long"]


def test_every_process_does_every_kind_in_every_repetition(tmp_path: Path) -> None:
    log = tmp_path / "log"
    kinds = ("short", "middle", "long")
    seconds = kinds_in_lockstep(partial(noting, log), kinds, repetitions=2)
    assert 1.5 < median_ratio(seconds["middle"], seconds["short"]) < 2.5
    assert 3 < median_ratio(seconds["long"], seconds["short"]) < 5
    done: dict[str, list[str]] = {}
    for line in log.read_text().splitlines():
        place, kind = line.split()
        done.setdefault(place, []).append(kind)
    assert len(done) == 3
    for each in done.values():
        # Once to warm up.
        assert sorted(each[:3]) == sorted(each[3:6]) == sorted(each[6:]) == sorted(kinds)
    for turn in range(3, 9):
        assert {each[turn] for each in done.values()} == set(kinds)


def test_no_kind_comes_first_or_after_another_more_often() -> None:
    kinds, turns = ("a", "b", "c"), range(24)
    # As in_lockstep begins: with another process in every repetition.
    assert Counter(_kind_of(kinds, turn % 3, turn) for turn in turns) == {"a": 8, "b": 8, "c": 8}
    orders = [[_kind_of(kinds, place, turn) for turn in turns] for place in range(3)]
    follows = Counter(pair for order in orders for pair in pairwise(order) if pair[0] != pair[1])
    assert set(follows) == set(permutations(kinds, 2))
    assert max(follows.values()) <= 1.5 * min(follows.values())
    beside = Counter(
        (orders[place][turn], orders[(place + 1) % 3][turn]) for turn in turns for place in range(3)
    )
    assert set(beside.values()) == {12}


def test_failing_case_is_told_with_its_traceback_and_ends_the_others(tmp_path: Path) -> None:
    makers = {"busy": partial(busy, 0.001, tmp_path / "log", "busy"), "failing": failing}
    with pytest.raises(RuntimeError, match=r"a case failed:[\s\S]*this case cannot be run"):
        in_lockstep(makers, repetitions=2, warm_up=False)
    assert not multiprocessing.active_children()
