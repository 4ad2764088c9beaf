"""`LocalMooncake`: a master and the memory that objects lie in, on this machine, for as long as a block.

    with LocalMooncake(segment_bytes=256 << 20) as local:
        backend = create_backend("mooncake", local.backend_config())

For runs without a store service of their own, examples, benchmarks and tests. Objects lie in a process that
neither reads nor writes, so that any of those that do may end. Whatever ends the process that started it, the
kernel ends both with it (Linux).
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from radix_transfer_plugins.errors import ConfigError, StoreUnavailableError

_START_TIMEOUT_S = 20.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_LOOPBACK = "127.0.0.1"

_SEGMENT_HOST = """
import signal, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
status = store.setup({
    "local_hostname": sys.argv[1], "metadata_server": "P2PHANDSHAKE", "global_segment_size": int(sys.argv[3]),
    "local_buffer_size": 0, "protocol": "tcp", "rdma_devices": "", "master_server_addr": sys.argv[2],
})
print("status", status, flush=True)
signal.sigwait([signal.SIGTERM])
store.close()
"""


class SegmentHost:
    """A process that lends `segment_bytes` to a store and does nothing else."""

    def __init__(self, master_address: str, segment_bytes: int, *, log_path: Path | None = None) -> None:
        """`log_path`: what it prints is added to that file. Raises StoreUnavailableError if it is refused."""
        command = [sys.executable, "-c", _SEGMENT_HOST, _LOOPBACK, master_address, str(segment_bytes)]
        # "-c" puts the working directory on the path, where a folder may be called mooncake.
        command.insert(1, "-P")
        self.process = _start(command, subprocess.PIPE, log_path)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        if line.split() != ["status", "0"]:
            _stop(self.process)
            raise StoreUnavailableError(
                f"mooncake: a segment of {segment_bytes} bytes could not be lent to {master_address}: the "
                f"client's set-up gave {line.strip() or 'no status'!r}{_last_lines(log_path)}"
            )

    def kill(self) -> None:
        """SIGKILL; its objects are lost."""
        _stop(self.process)

    def close(self) -> None:
        _stop(self.process)


class LocalMooncake:
    """Started at construction, listening when construction ends; `close` stops it and its segment host.

    Belongs to the thread that starts it: the kernel ends what the thread started when the thread ends.
    """

    def __init__(
        self,
        segment_bytes: int = 256 << 20,
        *,
        host: str = _LOOPBACK,
        log_path: Path | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        """`segment_bytes` 0: no segment host.

        `host`: the address that the master and its HTTP server listen at, loopback unless other machines are
        to reach them. `log_path`: a file for what both print. `flags` go to mooncake_master.

        Raises ConfigError when Mooncake is not installed, StoreUnavailableError when it does not start.
        """
        self._program = _master_program()
        self._host = host
        self._flags = flags
        self._log_path = log_path
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log_path.write_bytes(b"")
        self.port, self.metrics_port = _free_ports(host, 2)
        self.segment_host: SegmentHost | None = None
        self.process = self._launch()
        if segment_bytes:
            try:
                self.segment_host = SegmentHost(self.address, segment_bytes, log_path=log_path)
            except BaseException:
                self.close()
                raise

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    @property
    def metrics_address(self) -> str:
        return f"{self._host}:{self.metrics_port}"

    def backend_config(self, **options: object) -> dict[str, object]:
        """Configuration of the mooncake backend for this master; `options` are added."""
        return {
            "master_server_address": self.address,
            "metrics_server_address": self.metrics_address,
            "local_hostname": self._host,
            "local_buffer_size": "32mb",
            **options,
        }

    def kill(self) -> None:
        """SIGKILL the master alone."""
        _stop(self.process)

    def restart(self) -> None:
        """A new master on the same ports, which knows nothing of the old one's objects."""
        _stop(self.process)
        self.process = self._launch()

    def close(self) -> None:
        if self.segment_host is not None:
            self.segment_host.close()
        _stop(self.process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _launch(self) -> subprocess.Popen[bytes]:
        process = _start(
            [
                self._program,
                f"--rpc_address={self._host}",
                f"--rpc_port={self.port}",
                f"--metrics_host={self._host}",
                f"--metrics_port={self.metrics_port}",
                *self._flags,
            ],
            None,
            self._log_path,
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        for port in (self.port, self.metrics_port):
            while not _answers(self._host, port):
                if process.poll() is not None or time.monotonic() > deadline:
                    _stop(process)
                    raise StoreUnavailableError(
                        f"mooncake: the local master did not listen at {self._host}:{port} within "
                        f"{_START_TIMEOUT_S:g} s; exit status {process.returncode}"
                        f"{_last_lines(self._log_path)}"
                    )
                time.sleep(0.02)
        return process


def _master_program() -> str:
    """The console script of the interpreter's environment, or else the one on the PATH."""
    script = Path(sysconfig.get_path("scripts")) / "mooncake_master"
    found = str(script) if script.exists() else shutil.which("mooncake_master")
    if found is None:
        raise ConfigError(
            "mooncake_master is not installed; pip install 'radix-transfer-plugins[mooncake]' (it needs "
            "apt-get install -y libibverbs1 librdmacm1 libnuma1)"
        )
    return found


def _start(command: list[str], stdout: int | None, log_path: Path | None) -> subprocess.Popen[bytes]:
    """`stdout` None: with the errors, to the log or nowhere."""
    parent = os.getpid()

    def die_with_parent() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    log: IO[bytes] | int = subprocess.DEVNULL if log_path is None else log_path.open("ab")
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log if stdout is None else stdout,
            stderr=log,
            preexec_fn=die_with_parent,
            # An interrupt at the terminal must not end the store before its objects are deleted.
            start_new_session=True,
        )
    finally:
        if not isinstance(log, int):
            log.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL and reap; a process that has ended is no error."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _last_lines(log_path: Path | None) -> str:
    if log_path is None:
        return ""
    lines = log_path.read_text(errors="replace").splitlines()[-5:]
    return f"; see {log_path}: {' | '.join(lines)}"


def _free_ports(host: str, count: int) -> list[int]:
    """Ports that were free a moment ago; held open together, so that they differ."""
    sockets = [socket.create_server((host, 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True
