"""The same run with its engine in this process and behind `radix-rl serve`, by configuration alone."""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from radix_rl.errors import ConfigurationError
from radix_rl.train.run import train

RADIX_RL = str(Path(sys.executable).with_name("radix-rl"))
PREFIX = "over-http/output-store"


@contextlib.contextmanager
def served(model_path: Path, log_path: Path, *options: str) -> Iterator[str]:
    """The URL of a server process on a port of the system's choice."""
    command = [RADIX_RL, "serve", str(model_path)]
    command += ["--port", "0", "--dtype", "float32", "--kv-cache-tokens", "2048", "--context-length", "64"]
    command += ["--num-threads", "1", *options]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        yield url_of(process, log_path)
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def url_of(process: subprocess.Popen[bytes], log_path: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(rb"http://127\.0\.0\.1:\d+", line):
            return found[0].decode()
    raise AssertionError(log_path.read_text())


STORE_OPTIONS = (
    "--enable-return-routed-experts",
    "--output-store-backend",
    "shared_memory",
    "--output-store-backend-extra-config",
    json.dumps({"key_prefix": PREFIX}),
)


def run(make_config, environment, **sections):
    steps: dict[int, dict[str, float]] = {}
    config = make_config(eval={"every_steps": 2}, **sections)
    outcome = train(config, lambda step, metrics: steps.update({step: metrics}), environment)
    assert outcome.objects_left == 0
    return steps


def test_two_servers_train_like_the_engine_in_this_process(make_config, environment, model_path, tmp_path):
    with (
        served(model_path, tmp_path / "a.log", *STORE_OPTIONS) as first,
        served(model_path, tmp_path / "b.log", *STORE_OPTIONS) as second,
    ):
        remote = run(
            make_config,
            environment,
            engine={"type": "remote", "urls": [first, second]},
            weights={"transport": "http", "bucket_bytes": 20_000},
            output_store={"key_prefix": PREFIX},
        )
        assert [httpx.get(f"{url}/model_info").json()["weight_version"] for url in (first, second)] == [
            "2",
            "2",
        ]
    embedded = run(make_config, environment)
    # The same seeds give the same tokens wherever they are sampled; float32 leaves the sums' order free.
    for step in (1, 2):
        for name in ("rollout/reward_mean", "rollout/response_tokens_mean", "train/loss", "train/grad_norm"):
            assert remote[step][name] == pytest.approx(embedded[step][name], rel=1e-3, abs=1e-5)
        assert remote[step]["gap/max_ratio_deviation_with_replay"] < 1e-4
        assert remote[step]["rollout/response_bytes_store"] < remote[step]["rollout/response_bytes_inline"]
        assert remote[step]["weights/buckets"] > 1
    assert remote[2]["eval/accuracy"] == pytest.approx(embedded[2]["eval/accuracy"])


def test_a_server_without_the_store_is_refused_before_anything_is_generated(
    make_config, environment, model_path, tmp_path
):
    with (
        served(model_path, tmp_path / "a.log", "--enable-return-routed-experts") as url,
        pytest.raises(ConfigurationError, match="--output-store-backend shared_memory"),
    ):
        run(
            make_config,
            environment,
            engine={"type": "remote", "urls": [url]},
            weights={"transport": "http"},
            output_store={"key_prefix": PREFIX},
        )


def test_replay_works_inline_over_http_too(make_config, environment, model_path, tmp_path):
    with served(model_path, tmp_path / "a.log", "--enable-return-routed-experts") as url:
        steps = run(
            make_config,
            environment,
            engine={"type": "remote", "urls": [url]},
            weights={"transport": "http"},
            output_store={"enabled": False},
        )
    assert steps[2]["gap/max_ratio_deviation_with_replay"] < 1e-4
    assert steps[2]["rollout/response_bytes_store"] == steps[2]["rollout/response_bytes_inline"]
