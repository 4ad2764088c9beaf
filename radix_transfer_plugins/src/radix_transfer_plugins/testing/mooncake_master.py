"""A real `mooncake_master` on loopback, and processes that lend it memory, for tests, examples and
benchmarks.

    with MooncakeMaster(segment_bytes=256 << 20) as master:
        backend = create_backend("mooncake", master.backend_config())

Everything is stopped by process id when the block ends; if this process dies instead, the kernel stops it
(Linux).
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
from typing import Self

_START_TIMEOUT_S = 20.0
_PR_SET_PDEATHSIG = 1
_HOST = "127.0.0.1"

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
    """A process that lends `segment_bytes` to the store and does nothing else."""

    def __init__(self, master_address: str, segment_bytes: int) -> None:
        command = [sys.executable, "-c", _SEGMENT_HOST, _HOST, master_address, str(segment_bytes)]
        # "-c" puts the working directory on the path, where a folder may be called mooncake.
        command.insert(1, "-P")
        self.process = _start(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        if line.split() != ["status", "0"]:
            _stop(self.process)
            raise RuntimeError(
                f"a segment of {segment_bytes} bytes could not be lent to {master_address}: {line!r}"
            )

    def kill(self) -> None:
        """SIGKILL; its objects are lost."""
        _stop(self.process)

    def close(self) -> None:
        _stop(self.process)


class MooncakeMaster:
    """Started at construction, listening when construction ends; `close` stops it and its segment host."""

    def __init__(self, segment_bytes: int = 256 << 20, *, flags: tuple[str, ...] = ()) -> None:
        """`segment_bytes` 0: no segment host. `flags` go to mooncake_master."""
        self._flags = flags
        self.port, self.metrics_port = _free_ports(2)
        self.segment_host: SegmentHost | None = None
        self.process = self._launch()
        if segment_bytes:
            try:
                self.segment_host = SegmentHost(self.address, segment_bytes)
            except BaseException:
                self.close()
                raise

    @property
    def address(self) -> str:
        return f"{_HOST}:{self.port}"

    @property
    def metrics_address(self) -> str:
        return f"{_HOST}:{self.metrics_port}"

    def backend_config(self, **options: object) -> dict[str, object]:
        """Configuration of the mooncake backend for this master; `options` are added."""
        return {
            "master_server_address": self.address,
            "metrics_server_address": self.metrics_address,
            "local_hostname": _HOST,
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
                _master_program(),
                f"--rpc_address={_HOST}",
                f"--rpc_port={self.port}",
                f"--metrics_host={_HOST}",
                f"--metrics_port={self.metrics_port}",
                *self._flags,
            ],
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        for port in (self.port, self.metrics_port):
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    _stop(process)
                    raise RuntimeError(
                        f"mooncake_master did not listen on port {port} within {_START_TIMEOUT_S:g} s; "
                        f"exit status {process.returncode}"
                    )
                time.sleep(0.02)
        return process


def _master_program() -> str:
    """The console script of the interpreter's environment, or else the one on the PATH."""
    script = Path(sysconfig.get_path("scripts")) / "mooncake_master"
    found = str(script) if script.exists() else shutil.which("mooncake_master")
    if found is None:
        raise RuntimeError(
            "mooncake_master is not installed; pip install 'radix-transfer-plugins[mooncake]' (it needs "
            "apt-get install -y libibverbs1 librdmacm1 libnuma1)"
        )
    return found


def _start(command: list[str], stdout: int) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def die_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL and reap; a process that has ended is no error."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((_HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _answers(port: int) -> bool:
    try:
        socket.create_connection((_HOST, port), 1.0).close()
    except OSError:
        return False
    return True
