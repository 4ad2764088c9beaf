"""The threads that OpenMP keeps for a thread whose work with torch is done for now.

GNU's runtime keeps a pool for every thread that ever ran a parallel operation. It counts the threads of all
pools, idle ones too, and once they outnumber the CPUs a thread that waits for others sleeps instead of
spinning. A step of a small model waits hundreds of times and then takes two to four times as long. So where
several threads of a process use torch in turns, each ends its pool when its turn is over; its next parallel
operation makes a new one, in tens of microseconds a thread.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_OMP_PAUSE_SOFT = 1
_PROCESS = os.getpid()


def end_pool() -> None:
    """End the calling thread's pool, if it has one and the runtime is GNU's.

    Does nothing in a forked child: the runtime would wait for threads that only its parent has.
    """
    if os.getpid() != _PROCESS:
        return
    for runtime in _gnu_runtimes():
        runtime.omp_pause_resource_all(_OMP_PAUSE_SOFT)


@contextmanager
def pool_ended_after() -> Iterator[None]:
    """For a block of code, or as a decorator for a function."""
    try:
        yield
    finally:
        end_pool()


@cache
def _gnu_runtimes() -> tuple[ctypes.CDLL, ...]:
    """Those that are loaded when first asked for: after torch, which brings one."""
    if not _MAPS.exists():
        return ()
    paths = {line.split(maxsplit=5)[-1] for line in _MAPS.read_text().splitlines() if "libgomp" in line}
    # A file that was replaced since it was loaded cannot be named any more.
    runtimes = [ctypes.CDLL(path) for path in sorted(paths) if Path(path).is_file()]
    # GCC has it from version 9 on.
    return tuple(runtime for runtime in runtimes if hasattr(runtime, "omp_pause_resource_all"))
