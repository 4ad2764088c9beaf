"""Without the flags the server behaves as stock, plugin installed or not; what is refused at launch."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

BODY = {
    "input_ids": list(range(30, 60)),
    "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
    "return_routed_experts": True,
}


@pytest.fixture(scope="module")
def stock(start_sglang: Callable[..., Any], tiny_moe: Path) -> Iterator[Any]:
    with start_sglang(tiny_moe, "--enable-return-routed-experts") as server:
        yield server


def test_field_is_dropped_as_any_unknown_one_and_server_info_is_silent(stock: Any) -> None:
    answer = stock.generate({**BODY, "return_outputs_via_store": True})
    assert "routed_experts" in answer["meta_info"]
    assert "output_store_ref" not in answer["meta_info"]
    assert "output_store" not in httpx.get(f"{stock.url}/server_info").json()


def test_masks_with_several_samples_fail_as_they_do_on_stock(stock: Any) -> None:
    sampling = {"max_new_tokens": 3, "top_k": 5, "n": 2}
    response = stock.post("/generate", {**BODY, "sampling_params": sampling, "return_sampling_mask": True})
    assert response.status_code == 500


def test_nothing_is_hooked_after_the_arguments_have_been_read(stock: Any) -> None:
    """From then on SGLang logs each hook it applies; the parser's own come before that."""
    assert "server_args=" in stock.log.read_text()
    assert "hook(s) to" not in stock.log.read_text()


REFUSED_LAUNCHES = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
store = ["--output-store-backend", "shared_memory"]
for flags in (
    [*store, "--disaggregation-mode", "prefill"],
    [*store, "--pp-size", "2"],
    [*store, "--enable-hierarchical-cache"],
    [*store, "--output-store-backend-extra-config", "{not json"],
    ["--output-store-backend-extra-config", "{}"],
):
    try:
        prepare_server_args(["--model-path", sys.argv[1], *flags])
    except ValueError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("accepted", flags)
from radix_engine_plugins.session import check_reachable
from radix_engine_plugins.settings import StoreSettings
absent = {"master_server_address": "127.0.0.1:9", "local_hostname": "127.0.0.1"}
for backend, config in (("no_such", {}), ("mooncake", absent)):
    try:
        check_reachable(StoreSettings(backend=backend, config=config))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_launches_that_would_lose_outputs_are_refused_with_setting_and_remedy(
    sglang_python: str, tiny_moe: Path
) -> None:
    result = subprocess.run(
        [sglang_python, "-c", REFUSED_LAUNCHES, tiny_moe],
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = [line for line in result.stdout.splitlines() if "Error: " in line or line.startswith("accepted")]
    disaggregation, pipeline, hierarchical, broken, lone, unknown, unreachable = lines
    assert "--disaggregation-mode" in disaggregation
    assert "leave out one of the two" in disaggregation
    assert "--pp-size" in pipeline
    assert "--enable-hierarchical-cache" in hierarchical
    assert "expected a JSON object" in broken
    assert "needs --output-store-backend" in lone
    assert "no_such" in unknown
    assert "shared_memory" in unknown
    assert "127.0.0.1:9" in unreachable
