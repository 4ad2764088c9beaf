"""The same training against a server on the same machine, by configuration alone."""

import asyncio
import socket
import subprocess
import sys
import time

import httpx
import pytest

from radix_rl.train.run import train

PREFIX = "over-http/output-store"


@pytest.fixture
def server_url(model_path, tmp_path):
    """`radix-rl serve` in a process of its own, with the shared_memory store."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable, "-c", "from radix_rl.cli.main import main; main()",
        "serve", str(model_path), "--port", str(port), "--dtype", "float32", "--device", "cpu",
        "--kv-cache-tokens", "2048", "--num-threads", "1", "--enable-return-routed-experts",
        "--output-store-backend", "shared_memory",
        "--output-store-backend-extra-config", f'{{"key_prefix": "{PREFIX}"}}',
    ]  # fmt: skip
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(url, process, tmp_path / "server.log")
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_healthy(url, process, log):
    ends = time.monotonic() + 120
    while time.monotonic() < ends and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")


def test_training_over_http_takes_the_same_first_step_as_in_process(
    server_url, make_config, environment, tmp_path
):
    remote = {
        "engine": {"type": "remote", "urls": [server_url]},
        "weights": {"transport": "http"},
        "output_store": {"key_prefix": PREFIX},
    }
    results = {}
    for name, sections in {"embedded": {}, "remote": remote}.items():
        config = make_config(
            output_dir=str(tmp_path / name), algorithm={"old_logprobs": "rollout"}, **sections
        )
        logged = []
        outcome = train(config, lambda step, metrics, logged=logged: logged.append(metrics), environment)
        assert outcome.objects_left == 0
        results[name] = logged
    for metrics in results["remote"]:
        # The second step's too: the new weights arrived.
        assert metrics["gap/max_ratio_deviation_with_replay"] < 1e-4
    for metric in ("rollout/reward_mean", "train/tokens", "train/loss"):
        assert results["remote"][0][metric] == pytest.approx(results["embedded"][0][metric], abs=1e-5)
    assert results["remote"][1]["rollout/reward_mean"] == results["embedded"][1]["rollout/reward_mean"]
    version = asyncio.run(_version(server_url))
    assert version == "2"


async def _version(url):
    async with httpx.AsyncClient() as client:
        return (await client.get(f"{url}/model_info")).json()["weight_version"]
