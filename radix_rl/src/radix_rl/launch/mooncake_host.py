"""The process behind `local_mooncake`: starts the master and holds the memory that objects lie in.

`python -m radix_rl.launch.mooncake_host RPC_PORT METRICS_PORT SEGMENT_BYTES` prints a line when the store
can be used and ends, with the master, when its standard input closes.
"""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from radix_rl.errors import ConfigurationError

HOST = "127.0.0.1"
READY = "radix-rl mooncake host is ready"

_MASTER_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 5.0
_TRANSFER_BUFFER_BYTES = 16 << 20


def find_master() -> str:
    """Path of the mooncake_master program. Raises ConfigurationError with the command that installs it."""
    beside_python = Path(sys.executable).with_name("mooncake_master")
    found = str(beside_python) if beside_python.is_file() else shutil.which("mooncake_master")
    if found is None:
        raise ConfigurationError(
            "mooncake_master is not installed: pip install 'radix-transfer-plugins[mooncake]' (on Debian "
            "also: apt "
            "install libibverbs1 librdmacm1 libnuma1)"
        )
    return found


def main() -> None:
    port, metrics_port, segment_bytes = (int(argument) for argument in sys.argv[1:4])
    command = [find_master(), f"--rpc_port={port}", f"--metrics_port={metrics_port}"]
    master = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        _wait_for_master(master, port)
        client = _contribute(f"{HOST}:{port}", segment_bytes)
        print(READY, flush=True)
        sys.stdin.buffer.read()
        client.close()
    finally:
        master.terminate()
        try:
            master.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            master.kill()


def _wait_for_master(master: subprocess.Popen[bytes], port: int) -> None:
    """The client's own set-up would retry for 90 s against a master that is not there."""
    ends = time.monotonic() + _MASTER_TIMEOUT_S
    while time.monotonic() < ends and master.poll() is None:
        try:
            socket.create_connection((HOST, port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.05)
    sys.exit(f"mooncake_master does not listen at {HOST}:{port}")


def _contribute(master_address: str, segment_bytes: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    status = client.setup(
        {
            "local_hostname": HOST,
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": segment_bytes,
            "local_buffer_size": _TRANSFER_BUFFER_BYTES,
            "protocol": "tcp",
            "rdma_devices": "",
            "master_server_addr": master_address,
        }
    )
    if status != 0:
        sys.exit(f"set-up of the segment against {master_address} failed with status {status}")
    return client


if __name__ == "__main__":
    main()
