"""A Mooncake master and one storage segment on this machine, for runs without a store service of their
own."""

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from radix_rl.errors import EngineError
from radix_rl.launch.mooncake_host import HOST, READY, find_master

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0


@contextmanager
def local_mooncake(
    log_path: Path, *, segment_bytes: int = 1 << 30, local_buffer_bytes: int = 64 << 20
) -> Iterator[dict[str, Any]]:
    """Run both until the block ends; gives the backend's settings for `output_store.config` and for servers.

    The objects live in a process of their own, neither reader nor writer, so that any of these may end. It
    ends with the block, also when that raises, and with this process, however that dies. Raises
    ConfigurationError when Mooncake is not installed, EngineError with the log's last lines when it does
    not start.
    """
    find_master()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    port, metrics_port = _free_ports(2)
    module = "radix_rl.launch.mooncake_host"
    command = [sys.executable, "-m", module, str(port), str(metrics_port), str(segment_bytes)]
    with log_path.open("wb") as log:
        # In a session of its own: an interrupt at the terminal must not end it before its objects are freed.
        host = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_until_ready(host, log_path)
        logger.info("mooncake master at %s:%d, segment of %d bytes", HOST, port, segment_bytes)
        yield {
            "master_server_address": f"{HOST}:{port}",
            "metrics_server_address": f"{HOST}:{metrics_port}",
            "local_hostname": HOST,
            "local_buffer_size": local_buffer_bytes,
        }
    finally:
        _stop(host)


def _wait_until_ready(host: subprocess.Popen[bytes], log_path: Path) -> None:
    ends = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < ends:
        if READY in log_path.read_text(errors="replace").splitlines():
            return
        if host.poll() is not None:
            break
        time.sleep(0.05)
    lines = log_path.read_text(errors="replace").splitlines()[-5:]
    state = f"ended with status {host.returncode}" if host.returncode is not None else "is not ready"
    raise EngineError(
        f"the local Mooncake store {state} after at most {START_TIMEOUT_S:g} s; see {log_path}: "
        f"{' | '.join(lines)}"
    )


def _stop(host: subprocess.Popen[bytes]) -> None:
    """The host ends what it started when its input closes."""
    assert host.stdin is not None, "opened as a pipe"
    host.stdin.close()
    try:
        host.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        logger.warning("the local Mooncake store did not end within %g s and is killed", STOP_TIMEOUT_S)
        host.kill()
        host.wait()


def _free_ports(count: int) -> list[int]:
    """Free a moment ago; held open together, so that they differ."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports
