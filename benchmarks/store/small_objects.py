"""Cost of one small object while the store holds few and many: it must not grow with their number."""

import statistics
import tempfile
from collections.abc import Sequence

import msgspec
import numpy as np

from benchmarks.result import Result, at_most, shown
from benchmarks.timing import cpu_seconds
from radix_transfer_plugins import OutputStore, StoreRef, create_backend
from radix_transfer_plugins.backends.mooncake.local import LocalMooncake

FEW, MANY = 100, 10_000
ROUNDS_OF_FEW, ROUNDS_OF_MANY = 15, 3


class Small(msgspec.Struct):
    rows: np.ndarray


def run() -> list[Result]:
    with (
        LocalMooncake() as master,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="radix-bench-") as space,
    ):
        assert master.segment_host is not None
        servers = [master.process.pid, master.segment_host.process.pid]
        results = _measure(OutputStore(create_backend("memory")), [])
        results += _measure(OutputStore(create_backend("shared_memory", {"directory": space})), [])
        results += _measure(OutputStore(create_backend("mooncake", master.backend_config())), servers)
    return results


def _measure(store: OutputStore, servers: Sequence[int]) -> list[Result]:
    _cost(store, FEW, servers)
    few = [_cost(store, FEW, servers) for _ in range(ROUNDS_OF_FEW)]
    many = [_cost(store, MANY, servers) for _ in range(ROUNDS_OF_MANY)]
    name = store.backend.name
    store.close()
    of_few = [statistics.median(costs) for costs in zip(*few, strict=True)]
    of_many = [statistics.median(costs) for costs in zip(*many, strict=True)]
    results = []
    for what, cost, cost_of_few in zip(("put", "read", "delete"), of_many, of_few, strict=True):
        results.append(shown(f"small objects, {name}: {what}, {MANY}", 1e6 * cost, "us CPU an object"))
        results.append(shown(f"small objects, {name}: {what}, {MANY} / {FEW}", cost / cost_of_few, "ratio"))
    results.append(
        at_most(f"small objects, {name}: all three, {MANY} / {FEW}", sum(of_many) / sum(of_few), "ratio", 1.5)
    )
    return results


def _cost(store: OutputStore, num_objects: int, servers: Sequence[int]) -> tuple[float, float, float]:
    """CPU seconds an object, of all processes: put one by one, then read and deleted in one call each."""
    stash = Small(np.arange(16, dtype=np.int32))
    refs: list[StoreRef] = []

    def put() -> None:
        for _ in range(num_objects):
            refs.extend(store.put_many([stash]))

    def read() -> None:
        store.read_many([(ref, ["rows"]) for ref in refs], stash_type=Small, buffer_bytes=1 << 24)

    seconds = [cpu_seconds(case, servers) for case in (put, read, lambda: store.delete_many(refs))]
    put_s, read_s, delete_s = (each / num_objects for each in seconds)
    return put_s, read_s, delete_s
