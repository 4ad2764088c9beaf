"""`memory`: the objects of one process, shared by every backend of the same name in it."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Self

import msgspec

from radix_transfer_plugins.backends.base import Backend, BackendStats, Lease, ObjectInfo
from radix_transfer_plugins.backends.config import DEFAULT_KEY_PREFIX, parse_config
from radix_transfer_plugins.backends.lease import ViewLease
from radix_transfer_plugins.buffers import byte_view
from radix_transfer_plugins.codecs.base import Buffer
from radix_transfer_plugins.errors import (
    ConfigError,
    KeyExistsError,
    ObjectLostError,
    StoreFullError,
    StoreUnavailableError,
)
from radix_transfer_plugins.keys import check_prefix
from radix_transfer_plugins.sizes import parse_bytes, parse_seconds


class MemoryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str = "default"
    """Backends of one name in one process hold the same objects."""
    capacity_bytes: int | str | None = None
    """Most bytes stored at once, as an integer or as "1gb"; None: no limit."""
    wait_s: float | str = 10.0
    """How long a put waits for room before it raises StoreFullError."""
    key_prefix: str = DEFAULT_KEY_PREFIX


class _Space:
    """Objects shared by the backends of one name."""

    def __init__(self, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.used_bytes = 0
        self.num_clients = 0
        self.changed = threading.Condition()

    @property
    def free_bytes(self) -> float:
        return float("inf") if self.capacity_bytes is None else self.capacity_bytes - self.used_bytes


_spaces: dict[str, _Space] = {}
_spaces_lock = threading.Lock()


class MemoryBackend(Backend):
    """Copies in on put, no copies on get.

    Objects outlive their backends, until they are deleted or the process ends.
    """

    name: ClassVar[str] = "memory"

    def __init__(self, config: MemoryConfig) -> None:
        self.key_prefix = check_prefix(config.key_prefix)
        self.place = config.name
        self._wait_s = parse_seconds(config.wait_s, "wait_s")
        self._space_name = config.name
        capacity = (
            None if config.capacity_bytes is None else parse_bytes(config.capacity_bytes, "capacity_bytes")
        )
        self._closed = False
        with _spaces_lock:
            self._space = _spaces.setdefault(config.name, _Space(capacity))
            if self._space.capacity_bytes != capacity:
                raise ConfigError(
                    f"backend 'memory': the space {config.name!r} of this process has capacity_bytes "
                    f"{self._space.capacity_bytes!r}, got {capacity!r}; use one capacity or another name"
                )
            self._space.num_clients += 1

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        return cls(parse_config(config, MemoryConfig, cls.name))

    def put_batch(self, items: Sequence[tuple[str, Buffer]], *, waited_s: float = 0.0) -> None:
        self._require_open()
        needed = sum(byte_view(value).nbytes for _, value in items)
        space = self._space
        deadline = time.monotonic() + self._wait_s - waited_s
        with space.changed:
            while True:
                self._require_new(items)
                if needed <= space.free_bytes:
                    break
                left_s = deadline - time.monotonic()
                if left_s <= 0 or needed > (space.capacity_bytes or 0):
                    raise self._full(needed)
                space.changed.wait(left_s)
            now = time.time()
            stored = {key: (byte_view(value).tobytes(), now) for key, value in items}
            space.objects.update(stored)
            space.used_bytes += needed

    def get_batch(self, keys: Sequence[str]) -> Lease:
        self._require_open()
        with self._space.changed:
            objects = self._space.objects
            absent = [key for key in keys if key not in objects]
            if absent:
                raise ObjectLostError(f"the store does not hold {', '.join(map(repr, absent))}")
            return ViewLease([memoryview(objects[key][0]) for key in keys])

    def delete_batch(self, keys: Sequence[str]) -> None:
        self._require_open()
        with self._space.changed:
            for key in keys:
                value = self._space.objects.pop(key, None)
                if value is not None:
                    self._space.used_bytes -= len(value[0])
            self._space.changed.notify_all()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._require_open()
        with self._space.changed:
            found = [
                ObjectInfo(key=key, stored_bytes=len(value), created_s=created_s)
                for key, (value, created_s) in self._space.objects.items()
                if key.startswith(prefix)
            ]
        return iter(found)

    def stats(self) -> BackendStats:
        self._require_open()
        with self._space.changed:
            space = self._space
            return BackendStats(len(space.objects), space.used_bytes, space.capacity_bytes)

    def close(self) -> None:
        with _spaces_lock:
            if self._closed:
                return
            self._closed = True
            self._space.num_clients -= 1
            if not self._space.num_clients and not self._space.objects:
                del _spaces[self._space_name]

    def _require_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError("backend 'memory' was closed")

    def _require_new(self, items: Sequence[tuple[str, Buffer]]) -> None:
        keys = [key for key, _ in items]
        taken = [key for key in keys if key in self._space.objects]
        if taken or len(set(keys)) < len(keys):
            raise KeyExistsError(
                f"a put never overwrites; taken or given twice: {', '.join(map(repr, taken or keys))}"
            )

    def _full(self, needed: int) -> StoreFullError:
        space = self._space
        return StoreFullError(
            f"backend 'memory' has no room after {self._wait_s} s: need {needed} bytes, used "
            f"{space.used_bytes}, free {space.free_bytes}, capacity {space.capacity_bytes}; delete what was "
            "read or raise capacity_bytes"
        )
