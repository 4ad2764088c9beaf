"""CPU seconds of cases that take turns every few forward passes, each in a process of its own.

Cases that run one after the other are slowed down by what else the machine does in different seconds, by ten
percent and more; in lockstep they share the same ones. They also share one CPU: free to move, a process that
waits for its turn wakes up on another one with empty caches, and equal cases differ by five percent for one.
"""

import itertools
import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.timing import Case, cpu_seconds, stay_on_one_cpu

BeforePass = Callable[[], None]
MakeCase = Callable[[BeforePass], AbstractContextManager[Case]]
"""Builds a case, which calls the function it is given before each of its forward passes. To be pickled."""
MakeCaseOfKinds = Callable[[BeforePass], AbstractContextManager[Callable[[str], object]]]
"""The same for a case that can do its work in several ways: it is called with one's name."""

_PASSES_PER_TURN = 4
_TURN_TIMEOUT_S, _CASE_TIMEOUT_S = 120.0, 1200.0


def in_lockstep(
    makers: Mapping[str, MakeCase], *, repetitions: int, warm_up: bool = True
) -> dict[str, list[float]]:
    """Seconds of each case in each repetition. `warm_up`: each is run once before without being counted.

    RuntimeError with its traceback if a case fails; the others are ended then.
    """
    context = multiprocessing.get_context("spawn")
    turns = _Turns(context, len(makers))
    processes, connections = [], []
    try:
        for place, make in enumerate(makers.values()):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(make, turns, place, theirs, warm_up), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        _collect(connections)
        seconds: dict[str, list[float]] = {name: [] for name in makers}
        for repetition in range(repetitions):
            turns.begin(first=repetition % len(makers))
            for connection in connections:
                connection.send(None)
            for name, value in zip(makers, _collect(connections), strict=True):
                seconds[name].append(value)
        return seconds
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join(10)
            process.kill()
            process.join()


def kinds_in_lockstep(
    make: MakeCaseOfKinds, kinds: Sequence[str], *, repetitions: int
) -> dict[str, list[float]]:
    """Seconds of each kind in each repetition, summed over as many processes as there are kinds.

    Each process does every kind once a repetition, beside others that do the others. So no kind is favoured
    by what a process's memory is worth, which stays with it for life, nor, if their number is odd, by what
    it comes after and whose turn is first.
    """
    count = len(kinds)
    makers = {str(place): partial(_of_kinds, make, kinds, place) for place in range(count)}
    seconds = in_lockstep(makers, repetitions=repetitions * count, warm_up=False)
    sums: dict[str, list[float]] = {kind: [0.0] * repetitions for kind in kinds}
    for place in range(count):
        for turn, value in enumerate(seconds[str(place)]):
            sums[_kind_of(kinds, place, turn)][turn // count] += value
    return sums


@contextmanager
def _of_kinds(
    make: MakeCaseOfKinds, kinds: Sequence[str], place: int, before_pass: BeforePass
) -> Iterator[Case]:
    with make(before_pass) as case:
        for kind in kinds:
            case(kind)
        turns = itertools.count()
        yield lambda: case(_kind_of(kinds, place, next(turns)))


def _kind_of(kinds: Sequence[str], place: int, turn: int) -> str:
    """Of a process in one of its turns. The order is reversed in every other repetition."""
    count = len(kinds)
    direction = 1 if turn // count % 2 == 0 else -1
    return kinds[direction * (place + turn) % count]


def _collect(connections: Sequence[Connection]) -> list[Any]:
    """One message of each."""
    messages: dict[Connection, Any] = {}
    while len(messages) < len(connections):
        ready = wait([c for c in connections if c not in messages], _CASE_TIMEOUT_S)
        if not ready:
            raise RuntimeError(f"no case ended within {_CASE_TIMEOUT_S:.0f} s")
        for connection in ready:
            assert isinstance(connection, Connection)
            try:
                messages[connection] = connection.recv()
            except EOFError:
                raise RuntimeError("the process of a case died") from None
            if isinstance(messages[connection], str):
                raise RuntimeError(f"a case failed:\n{messages[connection]}")
    return [messages[connection] for connection in connections]


class _Turns:
    """One token goes round among the processes; who holds it runs."""

    def __init__(self, context: Any, count: int) -> None:
        self._tokens = [context.Semaphore(0) for _ in range(count)]
        self._running = context.Value("i", 0)

    def begin(self, first: int) -> None:
        self._running.value = len(self._tokens)
        self._tokens[first].release()

    def wait(self, place: int) -> None:
        if not self._tokens[place].acquire(timeout=_TURN_TIMEOUT_S):
            raise TimeoutError(f"no turn within {_TURN_TIMEOUT_S:.0f} s")

    def pass_on(self, place: int) -> None:
        self._tokens[(place + 1) % len(self._tokens)].release()

    def leave(self, place: int) -> None:
        """Hand the token on as long as others run; the last one drops it."""
        with self._running.get_lock():
            self._running.value -= 1
        while self._running.value:
            self.pass_on(place)
            while self._running.value and not self._tokens[place].acquire(timeout=0.01):
                pass


class _BeforePass:
    """Passes the turn on after every few passes, while the case is measured."""

    def __init__(self, turns: _Turns, place: int) -> None:
        self._turns = turns
        self._place = place
        self._passes = 0
        self.measured = False

    def __call__(self) -> None:
        if not self.measured:
            return
        self._passes += 1
        if self._passes % _PASSES_PER_TURN == 0:
            self._turns.pass_on(self._place)
            self._turns.wait(self._place)


def _serve(make: MakeCase, turns: _Turns, place: int, connection: Connection, warm_up: bool) -> None:
    """Runs in the case's process: one message when it is ready, one with its seconds for each repetition."""
    stay_on_one_cpu()
    before_pass = _BeforePass(turns, place)
    try:
        with make(before_pass) as case:
            if warm_up:
                case()
            connection.send(None)
            while True:
                try:
                    connection.recv()
                except EOFError:
                    return
                turns.wait(place)
                before_pass.measured = True
                seconds = cpu_seconds(case)
                before_pass.measured = False
                turns.leave(place)
                connection.send(seconds)
    except BaseException:
        connection.send(traceback.format_exc())
