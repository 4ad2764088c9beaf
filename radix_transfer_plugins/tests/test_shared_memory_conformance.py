from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from radix_transfer_plugins import create_backend
from radix_transfer_plugins.backends.base import Backend
from radix_transfer_plugins.testing import BackendConformance


@pytest.fixture
def directory() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm", prefix="radix-test-") as path:
        yield Path(path)


class TestSharedMemory(BackendConformance):
    @pytest.fixture
    def connect(self, directory: Path) -> Callable[[], Backend]:
        return lambda: create_backend("shared_memory", {"directory": str(directory / "store")})

    @pytest.fixture
    def connect_small(self, directory: Path) -> Callable[[], Backend]:
        config = {
            "directory": str(directory / "small"),
            "capacity_bytes": self.small_capacity_bytes,
            "wait_s": 1.0,
        }
        return lambda: create_backend("shared_memory", config)
