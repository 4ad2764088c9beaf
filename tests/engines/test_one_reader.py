"""One model in three engines, one reader: from each the rows of a Hugging Face forward."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radix_transfer_plugins import OutputStore, TokenOutputStash, create_backend
from radix_transfer_plugins.responses import find_refs

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

PROMPT = list(range(30, 60))
NUM_OUTPUTS = 4
OPT_IN = {"return_outputs_via_store": True}
SGLANG_BODY = {
    "input_ids": PROMPT,
    "sampling_params": {"max_new_tokens": NUM_OUTPUTS, "temperature": 0, "ignore_eos": True},
    "return_routed_experts": True,
    **OPT_IN,
}
VLLM_BODY = {
    "model": "tiny",
    "prompt": PROMPT,
    "max_tokens": NUM_OUTPUTS,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
    **OPT_IN,
}


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"directory": str(tmp_path_factory.mktemp("one_reader")), "key_prefix": "run-1/outputs"}


def ask_sglang(server: Any) -> tuple[Any, list[int]]:
    answer = server.generate(SGLANG_BODY)
    return answer, answer["output_ids"]


def ask_vllm(server: Any) -> tuple[Any, list[int]]:
    answer = server.post("/v1/completions", VLLM_BODY, timeout=600).json()
    return answer, answer["choices"][0]["token_ids"]


@pytest.fixture
def answers(
    start_sglang: Callable[..., Any],
    start_vllm: Callable[..., Any],
    start_process: Callable[..., Any],
    port: Callable[[], int],
    tiny_moe: Path,
    shared_store: dict[str, Any],
) -> dict[str, tuple[Any, list[int]]]:
    """Answer and output tokens of each engine; one server at a time."""
    flags = ["--output-store-backend", "shared_memory"]
    flags += ["--output-store-backend-extra-config", json.dumps(shared_store)]
    found = {}
    number = port()
    radix_rl = str(Path(sys.executable).parent / "radix-rl")
    command = [radix_rl, "serve", str(tiny_moe), "--port", str(number), "--dtype", "float32"]
    embedded = start_process(
        [*command, "--enable-return-routed-experts", *flags],
        f"http://127.0.0.1:{number}",
        OMP_NUM_THREADS="1",
    )
    found["embedded"] = ask_sglang(embedded.wait_until_healthy())
    embedded.stop()
    with start_sglang(tiny_moe, "--enable-return-routed-experts", *flags) as server:
        found["sglang"] = ask_sglang(server)
    store = {"output_store": {"backend": "shared_memory", "config": shared_store}}
    with start_vllm(
        tiny_moe, "--enable-return-routed-experts", "--additional-config", json.dumps(store)
    ) as server:
        found["vllm"] = ask_vllm(server)
    return found


def test_one_reader_gets_the_same_rows_from_every_engine(
    answers: dict[str, tuple[Any, list[int]]],
    shared_store: dict[str, Any],
    experts_of_full_forward: Callable[[list[int]], np.ndarray],
) -> None:
    store = OutputStore(create_backend("shared_memory", shared_store))
    refs = {engine: find_refs(answer)[0] for engine, (answer, _) in answers.items()}
    stashes = store.read_many(
        [(ref, ["routed_experts"]) for ref in refs.values()],
        stash_type=TokenOutputStash,
        buffer_bytes=1 << 24,
    )
    for (engine, (_, outputs)), stash in zip(answers.items(), stashes, strict=True):
        assert len(outputs) == NUM_OUTPUTS
        expected = experts_of_full_forward(PROMPT + outputs)[:-1]
        np.testing.assert_array_equal(stash.routed_experts, expected, err_msg=engine)
    store.delete_many(list(refs.values()))
    assert not list(store.list_objects())
    store.close()
