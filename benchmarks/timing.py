"""Seconds of wall time and of CPU time, over several processes; medians over alternating repetitions."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Case = Callable[[], object]
Meter = Callable[[Case], float]
"""Runs a case and gives the seconds that it took."""


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


def alternate(cases: Mapping[str, Case], *, repetitions: int, meter: Meter = cpu_seconds) -> dict[str, float]:
    """Median seconds of each case; the cases take turns, so that what disturbs the machine disturbs all.

    Each is run once before without being counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repetition in range(repetitions + 1):
        for name, case in cases.items():
            took = meter(case)
            if repetition:
                seconds[name].append(took)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _cpu_of(pids: Sequence[int]) -> float:
    total = 0.0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total
