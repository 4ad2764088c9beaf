"""Cases in lockstep: every process takes its turns, every kind is done in every process, failures end all."""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from benchmarks.lockstep import BeforePass, in_lockstep, kinds_in_lockstep
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
    def case() -> None:
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
        # The first was to warm up.
        assert sorted(each[1:4]) == sorted(each[4:7]) == sorted(kinds)
    for turn in range(7):
        assert {each[turn] for each in done.values()} == set(kinds)


def test_failing_case_is_told_with_its_traceback_and_ends_the_others(tmp_path: Path) -> None:
    makers = {"busy": partial(busy, 0.001, tmp_path / "log", "busy"), "failing": failing}
    with pytest.raises(RuntimeError, match=r"a case failed:[\s\S]*this case cannot be run"):
        in_lockstep(makers, repetitions=2)
    assert not multiprocessing.active_children()
