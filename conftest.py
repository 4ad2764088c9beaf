"""Options of the whole suite, and the real packages under their names.

They are loaded before pytest names test modules after their folders.

The folders bear the packages' names, so that a test module imported first would take the package's place.
"""

import errno
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

import radix_engine_plugins
import radix_rl
import radix_transfer_plugins

__all__ = ["radix_engine_plugins", "radix_rl", "radix_transfer_plugins"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults", "randomized fault tests")
    group.addoption("--fault-requests", type=int, default=1000, help="How many requests suffer faults.")
    group.addoption("--fault-seed", type=int, default=0, help="Seed of the faults, printed on failure.")


@contextmanager
def _files_grow_no_larger_than(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def files_grow_no_larger_than() -> Callable[[int], AbstractContextManager[None]]:
    """`with files_grow_no_larger_than(size_bytes):` writes of this process fail as on a full disk.

    Within a test only: afterwards pytest writes to what may be a larger file.
    """
    return _files_grow_no_larger_than


def _is_ours(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return False
    return True


def _has_address(address: str) -> Iterator[str]:
    """Give the machine's loopback interface an address that nothing outside reaches, while a test runs."""
    if _is_ours(address):
        yield address
        return
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip(f"only root with iproute2 can give this machine the address {address}")
    length = 128 if ":" in address else 32
    added = subprocess.run(["ip", "addr", "add", f"{address}/{length}", "dev", "lo"], capture_output=True)
    if added.returncode:
        pytest.skip(f"this machine does not take the address {address}: {added.stderr.decode().strip()}")
    try:
        yield address
    finally:
        subprocess.run(["ip", "addr", "del", f"{address}/{length}", "dev", "lo"], check=True)


@pytest.fixture
def second_address() -> Iterator[str]:
    """An IPv4 address of this machine that is not loopback (of RFC 5737's documentation range)."""
    yield from _has_address("192.0.2.2")


@pytest.fixture(params=["192.0.2.2", "2001:db8::2", "::1", "localhost"])
def own_host(request: pytest.FixtureRequest) -> Iterator[str]:
    """What may name this machine besides 127.0.0.1: addresses that are not loopback, IPv6, a name.

    The first two are of the documentation ranges of RFC 5737 and RFC 3849.
    """
    if request.param == "localhost":
        yield request.param
    else:
        yield from _has_address(request.param)
