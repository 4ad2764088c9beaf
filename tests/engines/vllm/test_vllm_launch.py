"""What is refused: opting in at a server without a store, and launches that would lose outputs."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

SAMPLING = {"max_tokens": 1, "temperature": 0.0}
OPT_IN = {"return_outputs_via_store": True}


@pytest.fixture(scope="module")
def stock(start_vllm: Callable[..., Any], tiny_moe_dense_first: Path) -> Any:
    """The plugin is installed, and no store asked for."""
    with start_vllm(tiny_moe_dense_first, "--enable-return-routed-experts", "--enable-scale-out") as server:
        yield server


def test_opting_in_without_a_store_is_a_400_naming_the_setting(stock: Any) -> None:
    completion = {"model": "tiny", "prompt": [30, 31], **SAMPLING}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **SAMPLING}
    tokens = {"token_ids": [30, 31], "sampling_params": SAMPLING}
    for path, body in (
        ("/v1/completions", {**completion, **OPT_IN}),
        ("/v1/completions", {**completion, "vllm_xargs": OPT_IN}),
        ("/v1/completions", {**completion, **OPT_IN, "stream": True}),
        ("/v1/chat/completions", {**chat, **OPT_IN}),
        ("/inference/v1/generate", {**tokens, **OPT_IN}),
        (
            "/inference/v1/generate",
            {**tokens, "sampling_params": {**SAMPLING, "extra_args": OPT_IN}},
        ),
    ):
        response = stock.post(path, body, timeout=600)
        assert response.status_code == 400, (path, response.text)
        assert "no output store" in response.text
        assert "--additional-config" in response.text


def test_server_info_has_no_store(stock: Any) -> None:
    assert "output_store" not in httpx.get(f"{stock.url}/server_info", timeout=60).json()


def test_without_a_store_answers_are_stock(stock: Any) -> None:
    response = stock.post("/v1/completions", {"model": "tiny", "prompt": [30, 31], **SAMPLING}, timeout=600)
    (choice,) = response.json()["choices"]
    assert choice["routed_experts"]
    assert "output_store_ref" not in choice


REFUSED_LAUNCHES = """
import json, sys
from types import SimpleNamespace
from vllm.usage.usage_lib import UsageContext
from radix_engine_plugins.vllm import session

def config(output_store, kv_role=None):
    transfer = SimpleNamespace(kv_role=kv_role) if kv_role else None
    return SimpleNamespace(additional_config={"output_store": output_store}, kv_transfer_config=transfer)

good = {"backend": "shared_memory", "config": {}}
for name, vllm_config, usage in (
    ("malformed", config({"back_end": "x"}), None),
    ("disaggregated", config(good, "kv_producer"), None),
    ("no routes", config(good), UsageContext.OPENAI_API_SERVER),
):
    try:
        accept = lambda *a, **k: print("accepted", name)
        session.make_async_llm(accept, object(), vllm_config, usage_context=usage)
    except ValueError as error:
        print(f"{name}: {error}")
"""


def test_launches_that_would_lose_outputs_are_refused_with_setting_and_remedy(
    vllm_python: str, vllm_environment: dict[str, str]
) -> None:
    done = subprocess.run(
        [vllm_python, "-c", REFUSED_LAUNCHES],
        env={**vllm_environment, "PATH": "/usr/bin:/bin", "VLLM_PLUGINS": "cpu_interpreter"},
        capture_output=True,
        text=True,
        check=True,
    )
    refused = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert "accepted" not in done.stdout
    assert 'expected {"backend": NAME' in refused["malformed"]
    assert "kv_role='kv_producer'" in refused["disaggregated"]
    assert "set VLLM_PLUGINS=radix_output_store" in refused["no routes"]


def test_unknown_versions_are_refused_only_where_the_plugin_was_asked_for(
    vllm_python: str, vllm_environment: dict[str, str]
) -> None:
    program = """
import json, vllm
from radix_engine_plugins.vllm import plugin
from vllm.v1.engine import async_llm
vllm.__version__ = "0.99.0"
generate = async_llm.AsyncLLM.generate
try:
    plugin.activate()
    print(json.dumps({"left_alone": async_llm.AsyncLLM.generate is generate}))
except RuntimeError as error:
    print(json.dumps({"error": str(error)}))
"""
    answers = []
    for plugins in ("radix_output_store", None):
        environment = {**vllm_environment, "PATH": "/usr/bin:/bin"}
        environment.pop("VLLM_PLUGINS")
        if plugins is not None:
            environment["VLLM_PLUGINS"] = plugins
        done = subprocess.run(
            [vllm_python, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    assert "supports vLLM 0.32.0, got '0.99.0'" in answers[0]["error"]
    assert answers[1] == {"left_alone": True}
