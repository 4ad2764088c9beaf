"""SGLang's inline path against the output store.

Its attention on a CPU computes the whole square of a cached prompt again, so prompts are as short as the
comparison allows: longer ones would measure that.
"""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.both_ways import CONCURRENCY, LAYERS, OUTPUT_TOKENS, TOP_K, Engine, compare, prompt
from benchmarks.result import Result

PROMPT_TOKENS = 1024


def _arguments(model: Path, port: int, config: dict[str, Any]) -> list[str]:
    return [
        *("-m", "sglang.launch_server", "--model-path", str(model), "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--disable-overlap-schedule", "--sleep-on-idle", "--max-total-tokens", "60000"),
        *("--max-running-requests", str(CONCURRENCY), "--enable-return-routed-experts"),
        *("--output-store-backend", "shared_memory"),
        *("--output-store-backend-extra-config", json.dumps(config)),
    ]


def _variables(environment: Path) -> dict[str, str]:
    """Importing the files of all 250 architectures takes most of the start."""
    (folder,) = environment.glob("lib/python*/site-packages/sglang/srt/models")
    unused = {path.stem for path in folder.glob("*.py")} - {"qwen2_moe", "qwen3_moe"}
    return {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(unused)}


def _rows_inline(answer: dict[str, Any]) -> np.ndarray:
    encoded = answer["meta_info"]["routed_experts"]
    return np.frombuffer(base64.b64decode(encoded), np.int32).reshape(-1, LAYERS, TOP_K)


SGLANG = Engine(
    name="SGLang",
    environment="sglang_cpu",
    arguments=_arguments,
    variables=_variables,
    path="/generate",
    body={
        "input_ids": prompt(PROMPT_TOKENS),
        "sampling_params": {"max_new_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True},
        "return_routed_experts": True,
    },
    rows_inline=_rows_inline,
    prompt_tokens=PROMPT_TOKENS,
    head_dim=8,
)


def run() -> list[Result]:
    return compare(SGLANG)
