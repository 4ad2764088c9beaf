"""Several servers behind one run: outputs through the store or inline, new weights to all of them."""

import json

import httpx
import pytest

from radix_rl.train.run import train

PREFIX = "http-fleet/output-store"
STORE = ("--output-store-backend", "shared_memory")
STORE_CONFIG = ("--output-store-backend-extra-config", json.dumps({"key_prefix": PREFIX}))


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
    make_config, environment, serve, tmp_path
):
    urls = [server.url for server in serve(2, *STORE, *STORE_CONFIG)]
    stored = run(make_config, environment, urls, output_store={"key_prefix": PREFIX})
    versions = [httpx.get(f"{url}/model_info").json()["weight_version"] for url in urls]
    inline = run(
        make_config, environment, urls, output_store={"enabled": False}, output_dir=str(tmp_path / "inline")
    )
    assert versions == ["2", "2"]
    for step in (1, 2):
        assert stored[step]["mismatch/max_ratio_deviation_with_replay"] < 1e-4
        assert stored[step]["rollout/response_bytes_store"] < stored[step]["rollout/response_bytes_inline"]
        assert stored[step]["weights/buckets"] > 1
        # The same seeds from the same first weights, on whichever server: only the way of the rows differs.
        assert inline[step]["rollout/reward_mean"] == pytest.approx(stored[step]["rollout/reward_mean"])
        assert inline[step]["train/loss"] == pytest.approx(stored[step]["train/loss"], rel=1e-3, abs=1e-5)
        assert inline[step]["rollout/stored_bytes"] == 0
