"""CPU seconds over several processes, medians over alternating repetitions."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def cpu_seconds(pids: Sequence[int] = ()) -> float:
    """CPU time of all threads of this process and of the processes `pids`, in seconds (Linux)."""
    total = time.process_time()
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total


def alternate(
    cases: Mapping[str, Callable[[], object]],
    *,
    repetitions: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Median seconds by `clock` of each case; the cases take turns, so that what disturbs the machine
    disturbs all.

    Each is run once before without being counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repetition in range(repetitions + 1):
        for name, case in cases.items():
            began = clock()
            case()
            if repetition:
                seconds[name].append(clock() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}
