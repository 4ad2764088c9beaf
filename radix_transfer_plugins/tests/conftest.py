"""A backend that records what OutputStore asks of it, and clients of a shared_memory store."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from radix_transfer_plugins import OutputStore
from radix_transfer_plugins.backends.memory import MemoryBackend, MemoryConfig
from radix_transfer_plugins.backends.shared_memory import SharedMemoryBackend
from radix_transfer_plugins.errors import StoreUnavailableError


class RecordingBackend(MemoryBackend):
    """The memory backend, telling what it was asked and failing the put it is told to."""

    def __init__(self, **options):
        super().__init__(MemoryConfig(name=uuid.uuid4().hex, wait_s=0.0, key_prefix="run/store", **options))
        self.put_calls = []
        self.get_calls = []
        self.fail_put_number = None
        self.failure = StoreUnavailableError("down")
        self.open_leases = 0
        self.most_open_leases = 0
        self.lent_views = []

    def put_batch(self, items, *, waited_s=0.0):
        self.put_calls.append([key for key, _ in items])
        if len(self.put_calls) == self.fail_put_number:
            raise self.failure
        super().put_batch(items, waited_s=waited_s)

    def get_batch(self, keys):
        self.get_calls.append(list(keys))
        lease = super().get_batch(keys)
        self.open_leases += 1
        self.lent_views += lease.views
        self.most_open_leases = max(self.most_open_leases, self.open_leases)
        release = lease.release

        def counted():
            self.open_leases -= 1
            release()

        lease.release = counted
        return lease

    def tamper(self, key, change):
        value, created_s = self._space.objects[key]
        self._space.objects[key] = (change(value), created_s)

    def backdate(self, key, seconds):
        value, created_s = self._space.objects[key]
        self._space.objects[key] = (value, created_s - seconds)


@pytest.fixture
def make_backend():
    """Makes a RecordingBackend of prefix "run/store"; its options are those of the memory backend."""
    return RecordingBackend


@pytest.fixture
def backend(make_backend):
    return make_backend()


@pytest.fixture
def store(backend):
    return OutputStore(backend)


@pytest.fixture
def directory() -> Iterator[Path]:
    """Of a shared_memory store, not made yet; removed afterwards."""
    with TemporaryDirectory(dir="/dev/shm", prefix="radix-test-") as path:
        yield Path(path) / "store"


@pytest.fixture
def connect(directory: Path) -> Iterator[Callable[..., SharedMemoryBackend]]:
    """Opens clients of the store in `directory`, and closes them afterwards."""
    backends: list[SharedMemoryBackend] = []

    def open_one(**options: object) -> SharedMemoryBackend:
        backends.append(SharedMemoryBackend.from_config({"directory": str(directory), **options}))
        return backends[-1]

    yield open_one
    for backend in backends:
        backend.close()
