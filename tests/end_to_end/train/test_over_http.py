"""The same training against a server on the same machine, by configuration alone."""

import json

import httpx
import pytest

from radix_rl.train.run import train

PREFIX = "over-http/output-store"
STORE = ("--output-store-backend", "shared_memory")
STORE_CONFIG = ("--output-store-backend-extra-config", json.dumps({"key_prefix": PREFIX}))


def metrics_of(config, environment):
    """Of each step; no object may be left."""
    logged = []
    outcome = train(config, lambda step, metrics: logged.append(metrics), environment)
    assert outcome.objects_left == 0
    return logged


@pytest.mark.parametrize("transport", ["http", "broadcast", "disk"])
def test_training_over_http_takes_the_same_steps_as_in_process(
    transport, serve, make_config, environment, tmp_path
):
    (server,) = serve(1, *STORE, *STORE_CONFIG)
    algorithm = {"old_logprobs": "rollout"}
    here = metrics_of(make_config(output_dir=str(tmp_path / "here"), algorithm=algorithm), environment)
    there = metrics_of(
        make_config(
            output_dir=str(tmp_path / "there"),
            algorithm=algorithm,
            engine={"type": "remote", "urls": [server.url]},
            weights={"transport": transport, "bucket_bytes": 20_000},
            output_store={"key_prefix": PREFIX},
        ),
        environment,
    )
    for metrics in there:
        # The second step's too: the new weights arrived.
        assert metrics["mismatch/max_ratio_deviation_with_replay"] < 1e-4
        assert metrics["weights/sent_bytes"] > 0
    for metric in ("rollout/reward_mean", "train/tokens", "train/loss"):
        assert there[0][metric] == pytest.approx(here[0][metric], abs=1e-5)
    assert there[1]["rollout/reward_mean"] == here[1]["rollout/reward_mean"]
    assert httpx.get(f"{server.url}/model_info").json()["weight_version"] == "2"
    assert not list((tmp_path / "there" / "weights").glob("writing*"))
