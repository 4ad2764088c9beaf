"""Seconds of wall time and of CPU time, over several processes; medians over alternating repetitions."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Case = Callable[[], object]
Meter = Callable[[Case], float]
"""Runs a case and gives the seconds that it took."""


def stay_on_one_cpu() -> None:
    """This thread, and the threads and processes that it starts from now on (Linux).

    Of two CPUs of a shared machine each is slowed down by other things at other times.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def wall_seconds(case: Case) -> float:
    began = time.perf_counter()
    case()
    return time.perf_counter() - began


def cpu_seconds(case: Case, servers: Sequence[int] = ()) -> float:
    """CPU time of all threads of this process and of the processes `servers` (Linux)."""
    servers_began = _cpu_of(servers)
    # Innermost, so that looking at the servers is not measured.
    began = time.process_time()
    case()
    own = time.process_time() - began
    return own + _cpu_of(servers) - servers_began


def take_turns(
    cases: Mapping[str, Case], *, repetitions: int, meter: Meter = cpu_seconds, warm_up: bool = True
) -> dict[str, list[float]]:
    """Seconds of each case in each repetition.

    The cases take turns, forwards and backwards, so that what disturbs the machine disturbs all. `warm_up`:
    each is run once before without being counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    if warm_up:
        for case in cases.values():
            meter(case)
    for repetition in range(repetitions):
        for name in list(cases) if repetition % 2 == 0 else reversed(list(cases)):
            seconds[name].append(meter(cases[name]))
    return seconds


def alternate(cases: Mapping[str, Case], *, repetitions: int, meter: Meter = cpu_seconds) -> dict[str, float]:
    """Median seconds of each case, taking turns after a warm-up."""
    seconds = take_turns(cases, repetitions=repetitions, meter=meter)
    return {name: statistics.median(values) for name, values in seconds.items()}


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median over repetitions of the ratio within one: a drift between repetitions cancels."""
    return statistics.median(n / d for n, d in zip(numerators, denominators, strict=True))


def _cpu_of(pids: Sequence[int]) -> float:
    total = 0.0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total
