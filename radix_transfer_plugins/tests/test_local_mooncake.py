"""A local Mooncake store: usable while it runs, gone with its block and its process, on loopback only."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from radix_transfer_plugins import OutputStore, TokenOutputStash, create_backend
from radix_transfer_plugins.backends.mooncake.local import LocalMooncake
from radix_transfer_plugins.errors import StoreUnavailableError


def processes_with(text: str) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if text in file.read().decode(errors="replace"):
                    found.append(pid)
        except OSError:
            continue
    return found


def until(holds: Callable[[], bool], seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not holds():
        time.sleep(0.1)
    return holds()


def test_objects_go_in_and_out_and_the_processes_end_with_the_block(tmp_path: Path) -> None:
    rows = np.arange(24, dtype=np.int32).reshape(4, 2, 3)
    with LocalMooncake(64 << 20, log_path=tmp_path / "runs" / "mooncake.log") as local:
        config = local.backend_config(local_buffer_size="16mb", key_prefix="test")
        assert len(processes_with(local.address)) == 1
        store = OutputStore(backend=create_backend("mooncake", config))
        (ref,) = store.put_many([TokenOutputStash(routed_experts=rows)])
        (stash,) = store.read_many(
            [(ref, ["routed_experts"])], stash_type=TokenOutputStash, buffer_bytes=1 << 20
        )
        store.delete_many([ref])
        store.close()
    assert stash.routed_experts is not None
    assert np.array_equal(stash.routed_experts, rows)
    assert not processes_with(local.address)
    assert not processes_with(f"--rpc_port={local.port}")
    assert "Master" in (tmp_path / "runs" / "mooncake.log").read_text()


def test_the_master_listens_at_its_one_address_only_with_its_metrics_too() -> None:
    with LocalMooncake(0) as local:
        for port in (local.port, local.metrics_port):
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            # Also this machine: what listens at every address answers here too.
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port), 1.0)


@pytest.mark.parametrize("who", [signal.SIGKILL, signal.SIGTERM])
def test_both_processes_end_with_a_parent_that_is_killed_whoever_else_holds_its_files(
    who: signal.Signals,
) -> None:
    script = (
        "import subprocess, time\n"
        "from radix_transfer_plugins.backends.mooncake.local import LocalMooncake\n"
        "with LocalMooncake(16 << 20) as local:\n"
        "    child = subprocess.Popen(['sleep', '60'], close_fds=False)\n"
        "    print(local.port, child.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    port, child = parent.stdout.readline().split()
    try:
        assert len(processes_with(f"--rpc_port={port}")) == 1
        assert len(processes_with(f"127.0.0.1:{port}")) == 1
        parent.send_signal(who)
        parent.wait()
        assert until(
            lambda: not processes_with(f"--rpc_port={port}") and not processes_with(f"127.0.0.1:{port}"), 15
        )
    finally:
        os.kill(int(child), signal.SIGKILL)
        parent.stdout.close()


def test_a_store_that_does_not_start_shows_its_log_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreUnavailableError, match=r"segment of \d+ bytes could not be lent.*m\.log: "),
        LocalMooncake(1 << 60, log_path=tmp_path / "m.log") as local,
    ):
        pytest.fail(f"started at {local.address}")
    with pytest.raises(
        StoreUnavailableError, match=r"did not listen .*exit status 1.*m\.log: .*no_such_flag"
    ):
        LocalMooncake(0, log_path=tmp_path / "m.log", flags=("--no_such_flag=1",))
