"""The same arrays through Ray's object store and through shared_memory, both ends in one process each way."""

import os
import tempfile

from benchmarks.result import Result, shown
from benchmarks.store.inputs import NUM_EXPERTS, routed_experts
from benchmarks.timing import alternate, wall_seconds
from radix_transfer_plugins import OutputStore, TokenOutputStash, create_backend
from radix_transfer_plugins.codecs.narrow import NarrowCodec

REPETITIONS = 30


def run() -> list[Result]:
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
    rows = routed_experts()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="radix-bench-") as space:
        backend = create_backend("shared_memory", {"directory": space})
        stores = {
            "shared_memory, narrow": OutputStore(
                backend, codecs={"routed_experts": NarrowCodec(NUM_EXPERTS)}
            ),
            "shared_memory, raw": OutputStore(backend),
        }

        def through_ray() -> None:
            ref = ray.put(rows)
            # A trainer's own copy, as read_many gives it; ray.get is a read-only view.
            assert ray.get(ref).copy()[-1, -1, -1] == rows[-1, -1, -1]

        def through(store: OutputStore) -> None:
            (ref,) = store.put_many([TokenOutputStash(routed_experts=rows)])
            store.read_many([(ref, ["routed_experts"])], stash_type=TokenOutputStash, buffer_bytes=1 << 30)
            store.delete_many([ref])

        cases = {"ray": through_ray}
        cases |= {name: (lambda store=store: through(store)) for name, store in stores.items()}
        wall = alternate(cases, repetitions=REPETITIONS, meter=wall_seconds)
        cpu = alternate(cases, repetitions=REPETITIONS)
        backend.close()
    ray.shutdown()
    return [
        shown(f"ray object store: {kind}, {name}", 1e3 * seconds[name], "ms, both ends")
        for kind, seconds in (("wall", wall), ("CPU of the client process", cpu))
        for name in cases
    ]
