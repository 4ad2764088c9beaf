from collections.abc import Callable, Iterator

import pytest

from radix_transfer_plugins import create_backend
from radix_transfer_plugins.backends.base import Backend
from radix_transfer_plugins.backends.mooncake.local import LocalMooncake
from radix_transfer_plugins.testing import BackendConformance


@pytest.fixture(scope="module")
def master() -> Iterator[LocalMooncake]:
    with LocalMooncake(segment_bytes=128 << 20) as master:
        yield master


@pytest.fixture(scope="module")
def small_master() -> Iterator[LocalMooncake]:
    with LocalMooncake(segment_bytes=16 << 20) as master:
        yield master


class TestMooncake(BackendConformance):
    small_capacity_bytes = 16 << 20

    @pytest.fixture
    def connect(self, master: LocalMooncake) -> Callable[[], Backend]:
        return lambda: create_backend("mooncake", master.backend_config(local_buffer_size="64mb"))

    @pytest.fixture
    def connect_small(self, small_master: LocalMooncake) -> Callable[[], Backend]:
        return lambda: create_backend(
            "mooncake", small_master.backend_config(wait_s=1.0, local_buffer_size="64mb")
        )
