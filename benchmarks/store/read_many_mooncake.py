"""read_many from Mooncake against the raw client's batch_get_into on the same stored bytes, and its peak
memory.
"""

import time
from pathlib import Path

import numpy as np

from benchmarks.result import Result, at_least, at_most, shown
from benchmarks.store.inputs import NUM_EXPERTS, routed_experts
from benchmarks.timing import alternate
from radix_transfer_plugins import OutputStore, TokenOutputStash
from radix_transfer_plugins.backends.mooncake import MooncakeBackend
from radix_transfer_plugins.backends.mooncake.stored import TRAILER_BYTES
from radix_transfer_plugins.codecs.base import Codec
from radix_transfer_plugins.codecs.narrow import NarrowCodec
from radix_transfer_plugins.codecs.raw import RawCodec
from radix_transfer_plugins.ref import StoreRef
from radix_transfer_plugins.testing.mooncake_master import MooncakeMaster

NUM_OBJECTS = 32
BUFFER_BYTES = 16 << 20


def run() -> list[Result]:
    results = []
    for codec in (RawCodec(), NarrowCodec(NUM_EXPERTS)):
        with MooncakeMaster(segment_bytes=320 << 20) as master:
            backend = MooncakeBackend.from_config(master.backend_config(local_buffer_size=BUFFER_BYTES))
            results += _measure(backend, codec)
            backend.close()
    return results


def _measure(backend: MooncakeBackend, codec: Codec) -> list[Result]:
    store = OutputStore(backend, codecs={"routed_experts": codec})
    refs = [
        store.put_many([TokenOutputStash(routed_experts=routed_experts())])[0] for _ in range(NUM_OBJECTS)
    ]
    requests = [(ref, ["routed_experts"]) for ref in refs]

    def read_many() -> list[TokenOutputStash]:
        return store.read_many(requests, stash_type=TokenOutputStash, buffer_bytes=BUFFER_BYTES)

    raw = _RawReader(backend, refs)
    seconds = alternate({"raw": raw.read, "read_many": read_many}, repetitions=7, clock=time.perf_counter)
    raw.close()
    before_kib = _reset_peak_kib()
    stashes = read_many()
    peak_bytes = (_peak_kib() - before_kib) << 10
    result_bytes = sum(stash.routed_experts.nbytes for stash in stashes if stash.routed_experts is not None)
    name = f"read_many from mooncake, {codec.name} codec"
    mb = sum(ref.fields["routed_experts"].stored_bytes for ref in refs) / 1e6
    ratio = seconds["raw"] / seconds["read_many"]
    rate = "MB/s of stored bytes"
    return [
        shown(f"{name}: batch_get_into alone", mb / seconds["raw"], rate),
        shown(f"{name}: read_many", mb / seconds["read_many"], rate),
        at_least(f"{name}: speed, read_many / batch_get_into", ratio, "ratio", 0.7),
        at_most(
            f"{name}: peak memory - result - buffer",
            (peak_bytes - result_bytes - BUFFER_BYTES) / 2**20,
            "MiB",
            32,
        ),
    ]


class _RawReader:
    """What the native client does at best: known keys, one registered destination that is used again."""

    def __init__(self, backend: MooncakeBackend, refs: list[StoreRef]) -> None:
        self._native = backend._client._native
        self._keys = [f"{ref.key}/routed_experts" for ref in refs]
        self._sizes = [ref.fields["routed_experts"].stored_bytes + TRAILER_BYTES for ref in refs]
        self._memory = np.empty(sum(self._sizes), np.uint8)
        self._pointers = [
            int(self._memory.ctypes.data + sum(self._sizes[:index])) for index in range(len(refs))
        ]
        assert self._native.register_buffer(self._memory.ctypes.data, self._memory.nbytes) == 0

    def read(self) -> None:
        assert self._native.batch_get_into(self._keys, self._pointers, self._sizes) == self._sizes

    def close(self) -> None:
        self._native.unregister_buffer(self._memory.ctypes.data)


def _reset_peak_kib() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_kib()


def _peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
