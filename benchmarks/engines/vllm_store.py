"""vLLM's inline path against the output store.

The engine's kernels run in Triton's interpreter here, which takes many times what the outputs cost. So of the
server's CPU seconds those of the API server's process are counted, where both ways go.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.both_ways import (
    CONCURRENCY,
    OUTPUT_TOKENS,
    Engine,
    compare,
    prompt,
)
from benchmarks.result import Result

PROMPT_TOKENS = 4096
KV_CACHE_BYTES = 1 << 30


def _arguments(model: Path, port: int, config: dict[str, Any]) -> list[str]:
    store = {"output_store": {"backend": "shared_memory", "config": config}}
    return [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32"),
        *("--served-model-name", "bench", "--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--max-model-len", str(PROMPT_TOKENS + 64)),
        *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--max-num-seqs", str(CONCURRENCY)),
        *("--enable-return-routed-experts", "--additional-config", json.dumps(store)),
    ]


def _variables(environment: Path) -> dict[str, str]:
    return {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "cpu_interpreter,radix_loop_probe,radix_output_store",
    }


def _rows_inline(answer: dict[str, Any]) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(answer["choices"][0]["routed_experts"])))


VLLM = Engine(
    name="vLLM",
    environment="vllm_cpu",
    arguments=_arguments,
    variables=_variables,
    path="/v1/completions",
    body={
        "model": "bench",
        "prompt": prompt(PROMPT_TOKENS),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    },
    rows_inline=_rows_inline,
    prompt_tokens=PROMPT_TOKENS,
    head_dim=32,
    front_end_alone=True,
)


def run() -> list[Result]:
    return compare(VLLM)
