"""Several servers behind one run: outputs through the store or inline, new weights to all of them."""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from radix_rl.train.run import train

PREFIX = "http-fleet/output-store"
ROUTED = "--enable-return-routed-experts"
STORE = ("--output-store-backend", "shared_memory")
STORE_CONFIG = ("--output-store-backend-extra-config", json.dumps({"key_prefix": PREFIX}))


@contextlib.contextmanager
def served(model_path: Path, log_path: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server process on a port of the system's choice."""
    command = [sys.executable, "-c", "from radix_rl.cli.main import main; main()", "serve", str(model_path)]
    command += ["--port", "0", "--dtype", "float32", "--device", "cpu", "--num-threads", "1", ROUTED]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--kv-cache-tokens", "2048", *options], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def url_of(process: subprocess.Popen[bytes], log_path: Path) -> str:
    ends = time.monotonic() + 120
    while time.monotonic() < ends and process.poll() is None:
        if found := re.search(r"ready .*(http://127\.0\.0\.1:\d+)", log_path.read_text()):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(log_path.read_text())


def run(make_config, environment, urls, **sections):
    """Metrics of each step; no object may be left."""
    steps: dict[int, dict[str, float]] = {}
    config = make_config(
        engine={"type": "remote", "urls": urls},
        weights={"transport": "http", "bucket_bytes": 20_000},
        **sections,
    )
    outcome = train(config, lambda step, metrics: steps.update({step: metrics}), environment)
    assert outcome.objects_left == 0
    return steps


def test_a_fleet_trains_through_the_store_and_inline_and_gets_every_version(
    make_config, environment, model_path, tmp_path
):
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    with (
        served(model_path, logs[0], *STORE, *STORE_CONFIG) as first,
        served(model_path, logs[1], *STORE, *STORE_CONFIG) as second,
    ):
        urls = [url_of(first, logs[0]), url_of(second, logs[1])]
        stored = run(make_config, environment, urls, output_store={"key_prefix": PREFIX})
        versions = [httpx.get(f"{url}/model_info").json()["weight_version"] for url in urls]
        inline = run(make_config, environment, urls, output_store={"enabled": False})
    assert versions == ["2", "2"]
    for step in (1, 2):
        assert stored[step]["gap/max_ratio_deviation_with_replay"] < 1e-4
        assert stored[step]["rollout/response_bytes_store"] < stored[step]["rollout/response_bytes_inline"]
        assert stored[step]["weights/buckets"] > 1
        # The same seeds from the same first weights, on whichever server: only the way of the rows differs.
        assert inline[step]["rollout/reward_mean"] == pytest.approx(stored[step]["rollout/reward_mean"])
        assert inline[step]["train/loss"] == pytest.approx(stored[step]["train/loss"], rel=1e-3, abs=1e-5)
        assert inline[step]["rollout/stored_bytes"] == 0
