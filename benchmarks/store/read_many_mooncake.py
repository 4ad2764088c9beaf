"""Speed and peak memory of read_many from Mooncake.

Beside it the raw client's batch_get_into on the same stored bytes.
"""

from pathlib import Path

import numpy as np

from benchmarks.result import Result, at_least, at_most, shown
from benchmarks.store.inputs import NUM_EXPERTS, routed_experts
from benchmarks.timing import alternate, wall_seconds
from radix_transfer_plugins import OutputStore, TokenOutputStash
from radix_transfer_plugins.backends.mooncake import MooncakeBackend
from radix_transfer_plugins.backends.mooncake.local import LocalMooncake
from radix_transfer_plugins.backends.mooncake.stored import TRAILER_BYTES
from radix_transfer_plugins.codecs.base import Codec
from radix_transfer_plugins.codecs.narrow import NarrowCodec
from radix_transfer_plugins.codecs.raw import RawCodec
from radix_transfer_plugins.ref import StoreRef

NUM_OBJECTS = 32
BUFFER_BYTES = 16 << 20


def run() -> list[Result]:
    results = []
    for codec in (RawCodec(), NarrowCodec(NUM_EXPERTS)):
        with LocalMooncake(segment_bytes=320 << 20) as master:
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

    # First, while this process has no freed memory that the result could hide in.
    before_kib = _reset_peak_kib()
    stashes = read_many()
    peak_bytes = (_peak_kib() - before_kib) << 10
    result_bytes = sum(stash.routed_experts.nbytes for stash in stashes if stash.routed_experts is not None)
    del stashes
    raw = _RawReader(backend, refs)
    cases = {"raw, warm memory": raw.read_warm, "raw, new memory": raw.read_new, "read_many": read_many}
    seconds = alternate(cases, repetitions=9, meter=wall_seconds)
    raw.close()
    name = f"read_many from mooncake, {codec.name} codec"
    stored_mb = sum(ref.fields["routed_experts"].stored_bytes for ref in refs) / 1e6
    beyond_mib = (peak_bytes - result_bytes - BUFFER_BYTES) / 2**20
    results = [shown(f"{name}: {case}", stored_mb / seconds[case], "MB/s of stored bytes") for case in cases]
    ratio = f"{name}: speed of batch_get_into"
    over_new, over_warm = (
        seconds[f"raw, {which} memory"] / seconds["read_many"] for which in ("new", "warm")
    )
    if codec.name == "raw":
        results.append(at_least(f"{ratio} into memory of the caller's own", over_new, "ratio", 0.7))
    else:
        # The answer has four times the stored bytes, which the raw client does not make.
        results.append(shown(f"{ratio} into memory of the caller's own", over_new, "ratio"))
    results.append(shown(f"{ratio} into memory used again", over_warm, "ratio"))
    results.append(at_most(f"{name}: peak memory - result - buffer", beyond_mib, "MiB", 32))
    return results


class _RawReader:
    """The native client alone: known keys, destinations registered here."""

    def __init__(self, backend: MooncakeBackend, refs: list[StoreRef]) -> None:
        self._native = backend._client._native
        self._keys = [f"{ref.key}/routed_experts" for ref in refs]
        self._sizes = [ref.fields["routed_experts"].stored_bytes + TRAILER_BYTES for ref in refs]
        self._memory = np.empty(sum(self._sizes), np.uint8)
        self._pointers = [
            int(self._memory.ctypes.data + sum(self._sizes[:index])) for index in range(len(refs))
        ]
        assert self._native.register_buffer(self._memory.ctypes.data, self._memory.nbytes) == 0

    def read_warm(self) -> None:
        """Into one block that stays registered and was written before: the upper bound."""
        assert self._native.batch_get_into(self._keys, self._pointers, self._sizes) == self._sizes

    def read_new(self) -> list[np.ndarray]:
        """Into arrays that the caller may keep, which is what read_many gives."""
        arrays = [np.empty(size, np.uint8) for size in self._sizes]
        pointers = [int(array.ctypes.data) for array in arrays]
        for pointer, size in zip(pointers, self._sizes, strict=True):
            assert self._native.register_buffer(pointer, size) == 0
        assert self._native.batch_get_into(self._keys, pointers, self._sizes) == self._sizes
        for pointer in pointers:
            self._native.unregister_buffer(pointer)
        return arrays

    def close(self) -> None:
        self._native.unregister_buffer(self._memory.ctypes.data)


def _reset_peak_kib() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_kib()


def _peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
