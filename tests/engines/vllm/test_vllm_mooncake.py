"""`vllm serve` with two API servers and two tensor-parallel workers over Mooncake.

Each API server has a Mooncake client of its own; then the store goes down.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from radix_transfer_plugins.backends.mooncake.local import LocalMooncake

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

PROMPT = list(range(30, 50))
BODY = {
    "model": "tiny",
    "prompt": PROMPT,
    "max_tokens": 2,
    "temperature": 0.0,
    "ignore_eos": True,
    "return_token_ids": True,
    "return_outputs_via_store": True,
}


@pytest.fixture(scope="module")
def master() -> Iterator[LocalMooncake]:
    """With a process that lends memory, so that servers and readers are clients only."""
    with LocalMooncake() as master:
        yield master


@pytest.fixture(scope="module")
def on_mooncake(
    start_vllm: Callable[..., Any],
    tiny_moe_dense_first: Path,
    store_flags: Callable[..., list[str]],
    master: LocalMooncake,
) -> Iterator[Any]:
    flags = store_flags("mooncake", master.backend_config(key_prefix="run-3/outputs"))
    flags += ["--enable-return-routed-experts", "--api-server-count", "2", "--tensor-parallel-size", "2"]
    # Each worker on a core of its own, where there are two.
    allowed = sorted(os.sched_getaffinity(0))
    cores = {"VLLM_CPU_OMP_THREADS_BIND": f"{allowed[0]}|{allowed[-1]}"}
    with start_vllm(tiny_moe_dense_first, *flags, environment=cores, console=True) as server:
        yield server


def test_every_api_server_stores_what_a_full_forward_gives(
    on_mooncake: Any, master: LocalMooncake, open_reader: Callable[..., Any], experts: Callable[..., Any]
) -> None:
    """A key's first part names the client that wrote it. The kernel picks the server of a connection."""
    reader = open_reader("mooncake", master.backend_config(key_prefix="run-3/outputs"))
    writers: dict[str, int] = {}
    deadline = time.monotonic() + 240
    while len(writers) < 2:
        assert time.monotonic() < deadline, f"one API server alone answered: {writers}"
        answer = on_mooncake.post("/v1/completions", BODY, timeout=240).json()
        ref, stash = reader.take(answer)
        outputs = answer["choices"][0]["token_ids"]
        np.testing.assert_array_equal(stash.routed_experts, experts(PROMPT + outputs)[:-1])
        assert stash.sampling_mask_lengths is None
        writer = ref.key.rsplit("/", 1)[0]
        writers[writer] = writers.get(writer, 0) + 1
    assert reader.is_empty_within(30), reader.keys()


def test_metrics_count_the_puts_of_all_api_servers(on_mooncake: Any, metric: Callable[..., float]) -> None:
    before = metric(on_mooncake, "output_store_puts_total")
    assert before >= 2
    for _ in range(4):
        assert on_mooncake.post("/v1/completions", BODY, timeout=240).status_code == 200
    assert metric(on_mooncake, "output_store_puts_total") == before + 4
    assert metric(on_mooncake, "output_store_put_failures_total") == 0


def test_every_api_server_says_that_the_store_is_on(on_mooncake: Any) -> None:
    for _ in range(6):
        info = httpx.get(f"{on_mooncake.url}/server_info", timeout=60).json()
        assert info["output_store"]["backend"] == "mooncake"


def test_store_that_went_down_fails_requests_and_the_server_goes_on(
    on_mooncake: Any, master: LocalMooncake
) -> None:
    """Last in this file."""
    master.kill()
    response = on_mooncake.post("/v1/completions", BODY, timeout=600)
    assert response.status_code == 500
    assert "could not be stored" in response.text
    inline = on_mooncake.post("/v1/completions", {**BODY, "return_outputs_via_store": False}, timeout=600)
    assert inline.json()["choices"][0]["routed_experts"]
