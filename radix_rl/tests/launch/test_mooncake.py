"""The local Mooncake store: usable while it runs, and gone with its block."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from radix_rl.errors import EngineError
from radix_rl.launch.mooncake import local_mooncake
from radix_transfer_plugins import OutputStore, TokenOutputStash, create_backend


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


def until(holds, seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not holds():
        time.sleep(0.1)
    return holds()


def test_objects_go_in_and_out_and_the_processes_end_with_the_block(tmp_path):
    rows = np.arange(24, dtype=np.int32).reshape(4, 2, 3)
    with local_mooncake(
        tmp_path / "mooncake.log", segment_bytes=64 << 20, local_buffer_bytes=16 << 20
    ) as config:
        port = config["master_server_address"].rpartition(":")[2]
        assert processes_with(f"--rpc_port={port}")
        store = OutputStore(backend=create_backend("mooncake", config | {"key_prefix": "test"}))
        (ref,) = store.put_many([TokenOutputStash(routed_experts=rows)])
        (stash,) = store.read_many(
            [(ref, ["routed_experts"])], stash_type=TokenOutputStash, buffer_bytes=1 << 20
        )
        store.delete_many([ref])
        store.close()
    assert stash.routed_experts is not None
    assert np.array_equal(stash.routed_experts, rows)
    assert not processes_with(f"--rpc_port={port}")


def test_the_store_ends_with_a_parent_that_is_killed(tmp_path):
    script = (
        "import time, pathlib\n"
        "from radix_rl.launch.mooncake import local_mooncake\n"
        f"with local_mooncake(pathlib.Path({str(tmp_path / 'm.log')!r}), segment_bytes=16 << 20) as config:\n"
        "    print(config['master_server_address'], flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    port = parent.stdout.readline().strip().rpartition(":")[2]
    assert processes_with(f"--rpc_port={port}")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert until(lambda: not processes_with(f"--rpc_port={port}"), 15)


def test_a_store_that_does_not_start_shows_its_log(tmp_path):
    with (
        pytest.raises(EngineError, match=r"ended with status 1 .*m\.log: .*segment against .* failed"),
        local_mooncake(tmp_path / "m.log", segment_bytes=1 << 60),
    ):
        pass
