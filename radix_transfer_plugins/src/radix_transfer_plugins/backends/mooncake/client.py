"""`Client`: the native Mooncake client, set up and closed safely."""

import contextlib
import ctypes
import importlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from radix_transfer_plugins.backends.mooncake import status
from radix_transfer_plugins.backends.mooncake.config import Address, MooncakeConfig
from radix_transfer_plugins.errors import ConfigError, StoreUnavailableError

_PROBE_TIMEOUT_S = 2.0
# Request header of the master's RPC protocol (coro_rpc: a magic byte, then zeros): a call of a function that
# does not exist, which a master answers at once with a header of its own.
_UNKNOWN_CALL = b"\x15" + bytes(19)
_CLOSE_TIMEOUT_S = 60.0
_TIMEOUT_VARIABLES = ("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS")
_ENVIRONMENT = threading.Lock()
"""Held while the variables are set: one process may make several clients at once."""


class Client:
    """The native store behind a counter of running calls.

    It is never closed under one, nor called once closed.

    Belongs to the process that made it: its threads do not survive a fork.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        self.config = config
        module = _import_client()
        self._pid = os.getpid()
        self._idle = threading.Condition()
        self._running = 0
        self._closed = False
        self.pinned = module.ReplicateConfig()
        self.pinned.with_hard_pin = True
        """Replication of every put: never evicted before it is removed."""
        self._native = _set_up(module.MooncakeDistributedStore(), config)

    @contextlib.contextmanager
    def native(self) -> Iterator[Any]:
        """The native store, for calls inside the block."""
        if os.getpid() != self._pid:
            raise StoreUnavailableError(
                "mooncake: this backend was created before a fork and does not work in the child; create one "
                "there"
            )
        with self._idle:
            if self._closed:
                raise StoreUnavailableError("mooncake: this backend was closed; create a new one")
            self._running += 1
        try:
            yield self._native
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    @contextlib.contextmanager
    def registered(self, buffers: Sequence[memoryview]) -> Iterator[list[int]]:
        """Addresses of writable buffers that the client may write into inside the block."""
        addresses = [address_of(buffer) for buffer in buffers]
        done: list[int] = []
        with self.native() as native:
            try:
                for address, buffer in zip(addresses, buffers, strict=True):
                    code = native.register_buffer(address, len(buffer))
                    if code:
                        raise StoreUnavailableError(
                            f"mooncake: registering {len(buffer)} bytes to read into failed with "
                            f"{status.describe(code)}"
                        )
                    done.append(address)
                yield addresses
            finally:
                for address in done:
                    native.unregister_buffer(address)

    def close(self) -> None:
        """Waits for running calls. Idempotent; nothing happens in a forked child."""
        with self._idle:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            if not self._idle.wait_for(lambda: not self._running, _CLOSE_TIMEOUT_S):
                raise StoreUnavailableError(
                    f"mooncake: {self._running} calls still run; the client was not closed"
                )
        self._native.close()


def address_of(buffer: memoryview) -> int:
    """Address of a writable, non-empty, flat buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def probe(master: Address) -> str:
    """This machine's address towards the master. Raises StoreUnavailableError within 5 seconds.

    The client's set-up retries for minutes what cannot work, and holds the GIL while it does, so a master
    that is not there, is stopped, or is something else must be found out before.
    """
    remedy = (
        f"Start one with `mooncake_master --rpc_port={master.port}`, or correct master_server_address (the "
        "port of --rpc_port, not of --metrics_port)"
    )
    try:
        with socket.create_connection((master.host, master.port), _PROBE_TIMEOUT_S) as connection:
            connection.settimeout(_PROBE_TIMEOUT_S)
            connection.sendall(_UNKNOWN_CALL)
            answer = connection.recv(1)
            address = connection.getsockname()[0]
    except TimeoutError as error:
        raise StoreUnavailableError(
            f"mooncake: nothing at {master} answered as a master within {_PROBE_TIMEOUT_S:g} s; it may be "
            f"stopped. {remedy}"
        ) from error
    except OSError as error:
        raise StoreUnavailableError(f"mooncake: no master at {master}: {error}. {remedy}") from error
    if answer != _UNKNOWN_CALL[:1]:
        raise StoreUnavailableError(f"mooncake: what listens at {master} is no master. {remedy}")
    return address


def _import_client() -> Any:
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"mooncake: the client is not installed ({error}); pip install "
            "'radix-transfer-plugins[mooncake]', or with a GPU the mooncake-transfer-engine wheel that fits "
            "its CUDA"
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"mooncake: the client does not load: {error}; apt-get install -y libibverbs1 librdmacm1 libnuma1"
        ) from error


@contextlib.contextmanager
def _rpc_timeout(timeout_s: float) -> Iterator[None]:
    """The native client reads its time limits from the environment when it is set up, and from nowhere else.

    Half of ours each: a call that fails asks the master a second time, to tell why.
    """
    limit_ms = str(max(1, int(timeout_s * 500)))
    with _ENVIRONMENT:
        before = {name: os.environ.get(name) for name in _TIMEOUT_VARIABLES}
        os.environ.update(dict.fromkeys(_TIMEOUT_VARIABLES, limit_ms))
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _set_up(native: Any, config: MooncakeConfig) -> Any:
    address = probe(config.master)
    options = config.setup | {
        "local_hostname": address if config.local_hostname is None else config.local_hostname,
        "master_server_addr": str(config.master),
    }
    named = ("local_hostname", "metadata_server", "protocol", "rdma_devices")
    where = f"master {config.master}, { ({name: options[name] for name in named}) }"
    with _rpc_timeout(config.timeout_s):
        try:
            code = native.setup(options)
        except MemoryError:
            code = status.BUFFER_FULL
    if code == status.BUFFER_FULL:
        raise StoreUnavailableError(
            "mooncake: set-up could not allocate its memory: global_segment_size "
            f"{options['global_segment_size']} and local_buffer_size {options['local_buffer_size']} bytes; "
            f"lower them ({where})"
        )
    if code != status.OK:
        raise StoreUnavailableError(
            f"mooncake: set-up failed with {status.describe(code)} ({where}). Check protocol (tcp, rdma), "
            "rdma_devices, metadata_server (P2PHANDSHAKE needs no server) and local_hostname; the client's "
            "log on stderr says which step failed"
        )
    return native
