"""`sglang.Engine` in a Python process, on a model whose first layer does not route."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

PROMPT = list(range(30, 50))
LAYERS, TOP_K = 4, 2


@pytest.fixture(scope="module")
def dense_first(tmp_path_factory: pytest.TempPathFactory, save_tokenizer: Callable[[Path], int]) -> Path:
    """A GLM-4-MoE of random float32 weights: a dense layer, then three of 8 experts and a shared one."""
    folder = tmp_path_factory.mktemp("dense_first")
    vocab_size = save_tokenizer(folder)
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=TOP_K,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=257,
        initializer_range=0.2,
    )
    Glm4MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def store_config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"directory": str(tmp_path_factory.mktemp("store")), "key_prefix": "run-3/outputs"}


@pytest.fixture(scope="module")
def answers(
    sglang_python: str, unused_models: str, dense_first: Path, store_config: dict[str, Any]
) -> dict[str, Any]:
    program = Path(__file__).parent / "engine_program.py"
    result = subprocess.run(
        [sglang_python, program, dense_first, json.dumps(store_config)],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "SGLANG_DISABLED_MODEL_ARCHS": unused_models,
        },
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, result.stderr[-4000:]
    return json.loads(lines[0].removeprefix("ANSWERS "))


@pytest.fixture(scope="module")
def reader(open_reader: Callable[..., Any], store_config: dict[str, Any]) -> Any:
    return open_reader("shared_memory", store_config)


@pytest.fixture(scope="module")
def expected_sets(dense_first: Path) -> Callable[[list[int]], np.ndarray]:
    """Sorted experts `[tokens, layers, top_k]` of one Hugging Face forward, -1 in the dense layer."""
    model = Glm4MoeForCausalLM.from_pretrained(dense_first, dtype=torch.float32).eval()
    picked: list[torch.Tensor] = []
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: picked.append(output[2]))

    def sets(token_ids: list[int]) -> np.ndarray:
        picked.clear()
        with torch.no_grad():
            model(torch.tensor([token_ids]))
        routed = torch.stack(picked, dim=1).sort(dim=-1).values
        dense = torch.full((len(token_ids), 1, TOP_K), -1)
        return torch.cat([dense, routed], dim=1).to(torch.int32).numpy()

    return sets


def test_layers_that_do_not_route_are_minus_one_and_the_others_equal_a_full_forward(
    answers: dict[str, Any], reader: Any, expected_sets: Callable
) -> None:
    for name in ("single", "stream", "async"):
        _, stash = reader.take(answers[name]["meta_info"])
        expected = expected_sets(PROMPT + answers[name]["output_ids"])[:-1]
        np.testing.assert_array_equal(np.sort(stash.routed_experts, axis=-1), expected)
        assert (stash.routed_experts[:, 0] == -1).all()


def test_batches_and_samples_have_an_object_each(answers: dict[str, Any], reader: Any) -> None:
    rows = [len(reader.take(answer["meta_info"])[1].routed_experts) for answer in answers["batch"]]
    assert rows == [23, 10]
    rows = [len(reader.take(answer["meta_info"])[1].routed_experts) for answer in answers["samples"]]
    assert rows == [22, 22]


def test_requests_that_did_not_opt_in_stay_inline(answers: dict[str, Any]) -> None:
    assert "routed_experts" in answers["inline"]["meta_info"]
    assert "output_store_ref" not in answers["inline"]["meta_info"]


def test_settings_do_not_stay_in_the_environment_of_the_calling_process(answers: dict[str, Any]) -> None:
    assert answers["inherits"] is False


def test_cancelled_call_leaves_nothing(answers: dict[str, Any], reader: Any) -> None:
    """Last in this file: all other objects have been taken."""
    assert answers["cancelled"] == "CancelledError"
    assert reader.is_empty_within(30), reader.keys()
