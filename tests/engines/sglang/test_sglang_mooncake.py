"""Mooncake as the store and several front-end processes; then the store goes down.

Each process has a client of its own.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from radix_transfer_plugins.backends.mooncake.local import LocalMooncake

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

BODY = {
    "input_ids": list(range(30, 60)),
    "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
    "return_routed_experts": True,
    "return_outputs_via_store": True,
}
PREFIX = "run-2/outputs"


@pytest.fixture(scope="module")
def master() -> Iterator[LocalMooncake]:
    """With a process that lends memory, so that servers and readers are clients only."""
    with LocalMooncake() as master:
        yield master


@pytest.fixture(scope="module")
def store_config(master: LocalMooncake) -> dict[str, Any]:
    return master.backend_config(key_prefix=PREFIX)


@pytest.fixture(scope="module")
def reader(open_reader: Callable[..., Any], store_config: dict[str, Any]) -> Any:
    return open_reader("mooncake", store_config)


@pytest.fixture(scope="module")
def workers(start_sglang: Callable[..., Any], tiny_moe: Path, store_config: dict[str, Any]) -> Iterator[Any]:
    with start_sglang(
        tiny_moe,
        "--enable-return-routed-experts",
        "--enable-metrics",
        "--tokenizer-worker-num",
        "2",
        "--output-store-backend",
        "mooncake",
        "--output-store-backend-extra-config",
        json.dumps(store_config),
    ) as server:
        yield server


def test_every_worker_stores_what_a_full_forward_gives(
    workers: Any, reader: Any, experts_of_full_forward: Callable
) -> None:
    """A key's first part names the client that wrote it."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(workers.generate, [BODY] * 40))
    writers = set()
    for answer in answers:
        ref, stash = reader.take(answer["meta_info"])
        expected = experts_of_full_forward(BODY["input_ids"] + answer["output_ids"])[:-1]
        np.testing.assert_array_equal(stash.routed_experts, expected)
        writers.add(ref.key.rsplit("/", 1)[0])
    assert len(writers) == 2
    assert reader.is_empty_within(30), reader.keys()


def test_metrics_count_the_puts_of_all_workers(
    workers: Any, reader: Any, metric: Callable[..., float]
) -> None:
    before = metric(workers, "output_store_puts_total")
    for answer in [workers.generate(BODY) for _ in range(6)]:
        reader.take(answer["meta_info"])
    assert metric(workers, "output_store_puts_total") == before + 6


def test_workers_serve_chat_streams_and_samples(workers: Any, reader: Any) -> None:
    sampling = {"max_new_tokens": 3, "temperature": 1.0, "top_k": 5, "n": 2, "ignore_eos": True}
    answers = workers.generate({**BODY, "sampling_params": sampling, "return_sampling_mask": True})
    for answer in answers:
        _, stash = reader.take(answer["meta_info"])
        assert stash.sampling_mask_lengths.tolist() == [5, 5, 5]
    chunks = workers.stream("/generate", BODY)
    reader.take(chunks[-1]["meta_info"])
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    opt_in = {"return_routed_experts": True, "return_outputs_via_store": True}
    response = workers.post("/v1/chat/completions", {**chat, **opt_in}).json()
    reader.take(response["choices"][0]["meta_info"])
    assert reader.is_empty_within(30), reader.keys()


def test_every_worker_says_that_the_store_is_on(workers: Any) -> None:
    for _ in range(6):
        info = httpx.get(f"{workers.url}/server_info").json()
        assert info["output_store"]["backend"] == "mooncake"
        assert info["output_store"]["key_prefix"] == PREFIX


def test_store_that_went_down_fails_requests_and_the_server_goes_on(
    workers: Any, master: LocalMooncake
) -> None:
    """Last in this file."""
    master.kill()
    response = workers.post("/generate", BODY, timeout=200)
    assert response.status_code == 500
    assert "could not be stored" in response.text
    inline = workers.generate({**BODY, "return_outputs_via_store": False})
    assert "routed_experts" in inline["meta_info"]
