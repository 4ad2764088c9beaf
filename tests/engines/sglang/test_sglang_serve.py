"""`sglang serve`, the entry that SGLang's models of all kinds share, takes the plugin's flags."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def test_the_common_entry_stores_what_the_module_does(
    start_sglang: Callable[..., Any],
    tiny_moe: Path,
    with_test_plugin: dict[str, str],
    test_plugin: ModuleType,
    store_config: dict[str, Any],
    open_reader: Callable[[str, dict[str, Any]], Any],
    full_forward: Callable[[Path], Callable[[list[int]], np.ndarray]],
) -> None:
    flags = ["--enable-return-routed-experts", "--output-store-backend", "faulty"]
    flags += ["--output-store-backend-extra-config", json.dumps(store_config)]
    reader = open_reader("faulty", store_config)
    body = {
        "input_ids": list(range(30, 50)),
        "sampling_params": {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True},
        "return_routed_experts": True,
        "return_outputs_via_store": True,
    }
    with start_sglang(tiny_moe, *flags, environment=with_test_plugin, console=True) as server:
        assert httpx.get(f"{server.url}/server_info", timeout=60).json()["output_store"]["enabled"]
        answer = server.post("/generate", body, timeout=600).json()
    _, stash = reader.take(answer)
    tokens = [*body["input_ids"], *answer["output_ids"]]
    expected = full_forward(tiny_moe)(tokens)[: len(tokens) - 1]
    assert np.array_equal(np.sort(stash.routed_experts), np.sort(expected))
    assert reader.clear() == []
