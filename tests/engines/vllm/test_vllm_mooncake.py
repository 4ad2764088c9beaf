"""Mooncake as the store; then the store goes down."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radix_transfer_plugins.testing.mooncake_master import MooncakeMaster

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

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
def master() -> Iterator[MooncakeMaster]:
    """With a process that lends memory, so that servers and readers are clients only."""
    with MooncakeMaster() as master:
        yield master


@pytest.fixture(scope="module")
def on_mooncake(
    start_vllm: Callable[..., Any],
    tiny_moe_dense_first: Path,
    store_flags: Callable[..., list[str]],
    master: MooncakeMaster,
) -> Iterator[Any]:
    flags = store_flags("mooncake", master.backend_config(key_prefix="run-3/outputs"))
    with start_vllm(tiny_moe_dense_first, "--enable-return-routed-experts", *flags) as server:
        yield server


def test_rows_come_back_from_mooncake(
    on_mooncake: Any, master: MooncakeMaster, open_reader: Callable[..., Any], experts: Callable[..., Any]
) -> None:
    reader = open_reader("mooncake", master.backend_config(key_prefix="run-3/outputs"))
    for _ in range(3):
        answer = on_mooncake.post("/v1/completions", BODY, timeout=600).json()
        _, stash = reader.take(answer)
        outputs = answer["choices"][0]["token_ids"]
        np.testing.assert_array_equal(stash.routed_experts, experts(PROMPT + outputs)[:-1])
        assert stash.sampling_mask_lengths is None
    assert reader.is_empty_within(20), reader.keys()


def test_store_that_went_down_fails_requests_and_the_server_goes_on(
    on_mooncake: Any, master: MooncakeMaster
) -> None:
    """Last in this file."""
    master.kill()
    response = on_mooncake.post("/v1/completions", BODY, timeout=600)
    assert response.status_code == 500
    assert "could not be stored" in response.text
    inline = on_mooncake.post("/v1/completions", {**BODY, "return_outputs_via_store": False}, timeout=600)
    assert inline.json()["choices"][0]["routed_experts"]
