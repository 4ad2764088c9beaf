"""The same training against a server on the same machine, by configuration alone."""

import json

import httpx
import pytest

from radix_rl.train.run import train

PREFIX = "over-http/output-store"


STORE = ("--output-store-backend", "shared_memory")
STORE_CONFIG = ("--output-store-backend-extra-config", json.dumps({"key_prefix": PREFIX}))


def test_training_over_http_takes_the_same_first_step_as_in_process(
    serve, make_config, environment, tmp_path
):
    (server,) = serve(1, *STORE, *STORE_CONFIG)
    remote = {
        "engine": {"type": "remote", "urls": [server.url]},
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
    assert httpx.get(f"{server.url}/model_info").json()["weight_version"] == "2"
