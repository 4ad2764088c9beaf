"""What is refused: opting in at a server without a store, and launches that would lose outputs."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

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


LAUNCHES = """
import os, sys
import vllm
from radix_engine_plugins.vllm import plugin

def say(name, call, *arguments, **more):
    try:
        call(*arguments, **more)
    except Exception as error:
        print(f"REFUSED {name}: {type(error).__name__}: {error}")
    else:
        print(f"ACCEPTED {name}")

known, vllm.__version__ = vllm.__version__, "0.99.0"
shapes = plugin.read_shapes
plugin.read_shapes = lambda folder: {**shapes(folder), "v1.engine.async_llm.AsyncLLM.generate": ["(self)"]}
say("changed version", plugin.activate)
from vllm.engine.arg_utils import AsyncEngineArgs
print("HOOKED" if hasattr(AsyncEngineArgs.create_engine_config, "__wrapped__") else "LEFT ALONE")
os.environ["VLLM_PLUGINS"] = "cpu_interpreter,radix_output_store"
say("changed version that was asked for", plugin.activate)
plugin.read_shapes = shapes
say("unknown version with the known shapes", plugin.activate)
print("HOOKED" if hasattr(AsyncEngineArgs.create_engine_config, "__wrapped__") else "LEFT ALONE")
del os.environ["VLLM_PLUGINS"]
vllm.__version__ = known

from vllm.usage.usage_lib import UsageContext

def launch(name, output_store, usage=UsageContext.ENGINE_CONTEXT, **more):
    arguments = AsyncEngineArgs(
        model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=512,
        enable_return_routed_experts=True, additional_config={"output_store": output_store}, **more
    )
    say(name, arguments.create_engine_config, usage)

good = {"backend": "shared_memory", "config": {"directory": sys.argv[2]}}
absent = {"master_server_address": "127.0.0.1:9", "local_hostname": "127.0.0.1"}
launch("good", good)
launch("malformed", {"back_end": "x"})
launch("unknown", {"backend": "no_such"})
launch("unreachable", {"backend": "mooncake", "config": absent})
transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_producer"}
launch("disaggregated", good, kv_transfer_config=transfer)
launch("offloading", good, kv_offloading_size=1.0)
launch("no routes", good, UsageContext.OPENAI_API_SERVER)
"""


@pytest.fixture(scope="module")
def launches(
    vllm_python: str,
    vllm_environment: dict[str, str],
    tiny_moe_dense_first: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[str]:
    """Lines that the program printed; one process, since importing vLLM is what takes its time.

    `create_engine_config` is what every launch does before it starts processes or loads a model.
    `VLLM_PLUGINS` is not set, so vLLM loads this plugin, but not its routes.
    """
    environment = {**vllm_environment, "PATH": "/usr/bin:/bin"}
    environment.pop("VLLM_PLUGINS")
    done = subprocess.run(
        [vllm_python, "-c", LAUNCHES, tiny_moe_dense_first, tmp_path_factory.mktemp("store")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    starts = ("REFUSED ", "ACCEPTED ", "HOOKED", "LEFT ALONE")
    return [line for line in done.stdout.splitlines() if line.startswith(starts)]


@pytest.fixture(scope="module")
def refused(launches: list[str]) -> dict[str, str]:
    """Reasons by name."""
    lines = [line.removeprefix("REFUSED ") for line in launches if line.startswith("REFUSED ")]
    return dict(line.split(": ", 1) for line in lines)


def test_launches_that_would_lose_outputs_are_refused_before_anything_starts(
    launches: list[str], refused: dict[str, str]
) -> None:
    assert "ACCEPTED good" in launches
    assert 'expected {"backend": NAME' in refused["malformed"]
    assert "shared_memory" in refused["unknown"]
    assert "127.0.0.1:9" in refused["unreachable"]
    assert "kv_role='kv_producer'" in refused["disaggregated"]
    assert "kv_connector='OffloadingConnector'" in refused["offloading"]
    assert "set VLLM_PLUGINS=radix_output_store" in refused["no routes"]


def test_a_version_with_a_changed_seam_is_refused_only_where_the_plugin_was_asked_for(
    launches: list[str], refused: dict[str, str]
) -> None:
    assert launches[:2] == ["ACCEPTED changed version", "LEFT ALONE"]
    reason = refused["changed version that was asked for"]
    assert "supports vLLM 0.32.0, 0.33.0, got '0.99.0'" in reason
    assert "AsyncLLM.generate is (self, prompt, sampling_params, request_id" in reason


def test_a_version_that_is_not_in_the_table_runs_where_every_seam_has_a_known_shape(
    launches: list[str],
) -> None:
    assert launches[3:5] == ["ACCEPTED unknown version with the known shapes", "HOOKED"]
