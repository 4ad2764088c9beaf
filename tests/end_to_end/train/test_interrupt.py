"""A run that is told to stop deletes what it stored, and says how to go on."""

import json
import signal
import subprocess
import sys
import time

import pytest

from radix_transfer_plugins import OutputStore, create_backend

RADIX_RL = [sys.executable, "-c", "from radix_rl.cli.main import main; main()"]
PREFIX = "interrupt/output-store"

CONFIG = """
output_dir = "{folder}/run"
[model]
path = "{model}"
[engine]
type = "embedded"
kv_cache_tokens = 4096
context_length = 64
[output_store]
key_prefix = "{prefix}"
[environment]
type = "arithmetic"
[rollout]
prompts_per_step = 8
samples_per_prompt = 4
sampling.max_new_tokens = 24
[train]
steps = 100000
num_threads = 1
"""


def as_a_script_s_background_job():
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize(
    ("sent", "before", "overrides"),
    [
        (signal.SIGINT, None, []),
        (signal.SIGTERM, as_a_script_s_background_job, ["checkpoint.save_on_interrupt=true"]),
    ],
    ids=["SIGINT", "SIGTERM, saving"],
)
def test_a_signal_ends_the_run_in_good_order(sent, before, overrides, model_path, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(folder=tmp_path, model=model_path, prefix=PREFIX))
    metrics = tmp_path / "run/metrics.jsonl"
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [*RADIX_RL, "train", str(path), *overrides],
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=before,
        )
    try:
        ends = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
            assert process.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < ends, (tmp_path / "output").read_text()
            time.sleep(0.05)
        process.send_signal(sent)
        status = process.wait(60)
    finally:
        process.kill()
        process.wait()
    printed = (tmp_path / "output").read_text()
    assert status == 130, printed
    assert "Traceback" not in printed
    assert printed.startswith(f"run: stored outputs have the key prefix {PREFIX}\n")
    checkpoints = tmp_path / "run/checkpoints"
    if overrides:
        last = json.loads(metrics.read_text().splitlines()[-1])["step"]
        assert [found.name for found in checkpoints.iterdir()] == [f"step-{last}"]
        kept = f"{checkpoints}/step-{last} is kept"
    else:
        assert not checkpoints.exists()
        kept = "no checkpoint was saved, so that it begins again"
    command = " ".join(["radix-rl train", str(path), *overrides, "checkpoint.resume=latest"])
    assert printed.endswith(f"interrupted: {kept}; go on with\n  {command}\n")
    store = OutputStore(backend=create_backend("shared_memory"), key_prefix=PREFIX)
    assert list(store.list_objects()) == []
    store.close()
