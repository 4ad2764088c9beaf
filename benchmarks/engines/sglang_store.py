"""SGLang's inline path against the output store: the same requests to one server, in alternating blocks.

A model of 24 MoE layers, top-8 of 64 experts, prompts of 2048 tokens and 16 requests at a time. Prompts
repeat, so that the prefix cache leaves little arithmetic and the way of the outputs shows: 2055 rows, 1.6
MB of int32 a request."""

import base64
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.result import Result, at_most, shown
from radix_transfer_plugins import OutputStore, StoreRef, TokenOutputStash, create_backend

ROOT = Path(__file__).resolve().parents[2]
LAYERS, EXPERTS, TOP_K = 24, 64, 8
PROMPT_TOKENS, OUTPUT_TOKENS = 2048, 8
ROWS = PROMPT_TOKENS + OUTPUT_TOKENS - 1
CONCURRENCY, BLOCKS, REQUESTS_A_BLOCK = 16, 3, 32
START_TIMEOUT_S = 600


@dataclass
class Side:
    """What was seen of one way, over all its blocks."""

    response_bytes: list[int] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    server_cpu_s: list[float] = field(default_factory=list)
    """Per request, one figure a block."""
    client_cpu_s: list[float] = field(default_factory=list)
    longest_stall_s: list[float] = field(default_factory=list)
    """One figure a block."""


def measure() -> dict[str, Side]:
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="radix-bench-")))
        shared = Path(
            ending.enter_context(tempfile.TemporaryDirectory(prefix="radix-bench-", dir="/dev/shm"))
        )
        config = {"directory": str(shared), "key_prefix": "bench/outputs"}
        model = _save_model(folder / "model")
        probe = folder / "stalls.log"
        server, url = _start_server(model, config, probe, folder / "server.log")
        ending.callback(_stop, server)
        store = OutputStore(create_backend("shared_memory", config))
        ending.callback(store.close)
        ways: dict[str, tuple[bool, Callable[[dict[str, Any]], np.ndarray]]] = {
            "inline": (False, _rows_inline),
            "store": (True, lambda meta_info: _rows_stored(store, meta_info)),
        }
        sides = {name: Side() for name in ways}
        for via_store, rows in ways.values():
            _run_block(url, server.pid, probe, via_store, rows, Side(), CONCURRENCY)
        for _ in range(BLOCKS):
            for name, (via_store, rows) in ways.items():
                _run_block(url, server.pid, probe, via_store, rows, sides[name], REQUESTS_A_BLOCK)
        return sides


def _run_block(
    url: str,
    server_pid: int,
    probe: Path,
    via_store: bool,
    rows: Callable[[dict[str, Any]], np.ndarray],
    side: Side,
    num_requests: int,
) -> None:
    sampling = {"max_new_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    prompt = [token % 256 for token in range(PROMPT_TOKENS)]
    body = {"input_ids": prompt, "sampling_params": sampling, "return_routed_experts": True}
    content = json.dumps({**body, "return_outputs_via_store": via_store}).encode()
    headers = {"Content-Type": "application/json"}

    def ask(client: httpx.Client) -> None:
        started = time.perf_counter()
        response = client.post(f"{url}/generate", content=content, headers=headers)
        latency_s = time.perf_counter() - started
        response.raise_for_status()
        array = rows(json.loads(response.content)["meta_info"])
        assert array.shape == (ROWS, LAYERS, TOP_K)
        side.latencies_s.append(latency_s)
        side.response_bytes.append(len(response.content))

    started_s, client_cpu_s, server_cpu_s = time.monotonic(), time.process_time(), _cpu_s(server_pid)
    limits = httpx.Limits(max_connections=CONCURRENCY)
    with httpx.Client(timeout=300, limits=limits) as client, ThreadPoolExecutor(CONCURRENCY) as pool:
        for future in [pool.submit(ask, client) for _ in range(num_requests)]:
            future.result()
    side.client_cpu_s.append((time.process_time() - client_cpu_s) / num_requests)
    side.server_cpu_s.append((_cpu_s(server_pid) - server_cpu_s) / num_requests)
    side.longest_stall_s.append(_longest_stall_s(probe, started_s, time.monotonic()))


def _rows_inline(meta_info: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(meta_info["routed_experts"]), np.int32).reshape(-1, LAYERS, TOP_K)


def _rows_stored(store: OutputStore, meta_info: dict[str, Any]) -> np.ndarray:
    ref = StoreRef.from_builtins(meta_info["output_store_ref"])
    (stash,) = store.read_many([(ref, ["routed_experts"])], stash_type=TokenOutputStash, buffer_bytes=1 << 26)
    store.delete_many([ref])
    assert stash.routed_experts is not None
    return stash.routed_experts


def _cpu_s(pid: int) -> float:
    """Of a process and its children, which live as long as it does."""
    parent = psutil.Process(pid)
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def _longest_stall_s(probe: Path, start_s: float, end_s: float) -> float:
    stalls = (line.split() for line in probe.read_text().splitlines())
    return max((float(late) for at, late in stalls if start_s <= float(at) <= end_s), default=0.0)


def _save_model(folder: Path) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


def _start_server(
    model: Path, config: dict[str, Any], probe: Path, log: Path
) -> tuple[subprocess.Popen, str]:
    builder = ROOT / "tests" / "engines" / "environments" / "build.py"
    built = subprocess.run(
        [sys.executable, builder, "sglang_cpu"], check=True, stdout=subprocess.PIPE, text=True
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [f"{built.stdout.strip()}/bin/python", "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--disable-overlap-schedule", "--sleep-on-idle", "--max-total-tokens", "60000"]
    command += ["--max-running-requests", str(CONCURRENCY), "--enable-return-routed-experts"]
    command += [
        "--output-store-backend",
        "shared_memory",
        "--output-store-backend-extra-config",
        json.dumps(config),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # Importing the files of all 250 architectures takes most of the start.
        "SGLANG_DISABLED_MODEL_ARCHS": _unused_models(Path(built.stdout.strip())),
        "PYTHONPATH": str(Path(__file__).parent / "sglang_probe"),
        "RADIX_LOOP_PROBE": str(probe),
    }
    with log.open("wb") as stream:
        server = subprocess.Popen(
            command, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return server, url
        except httpx.HTTPError:
            pass
        time.sleep(1)
    _stop(server)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")


def _unused_models(environment: Path) -> str:
    (folder,) = environment.glob("lib/python*/site-packages/sglang/srt/models")
    return ",".join({path.stem for path in folder.glob("*.py")} - {"qwen2_moe", "qwen3_moe"})


def _stop(server: subprocess.Popen) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, sign)
            server.wait(timeout=20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    server.wait()


def percentile(values: list[float], share: float) -> float:
    return float(np.quantile(values, share))


FIGURES: dict[str, tuple[str, Callable[[Side], float]]] = {
    "response bytes": ("bytes", lambda side: statistics.median(side.response_bytes)),
    "server CPU a request": ("s", lambda side: statistics.median(side.server_cpu_s)),
    "client CPU a request": ("s", lambda side: statistics.median(side.client_cpu_s)),
    "latency p50": ("s", lambda side: percentile(side.latencies_s, 0.5)),
    "latency p99": ("s", lambda side: percentile(side.latencies_s, 0.99)),
    "longest stall of the event loop": ("s", lambda side: statistics.median(side.longest_stall_s)),
}


def run() -> list[Result]:
    """Each figure both ways, and their ratio, which must stay below one."""
    sides = measure()
    results = []
    for name, (unit, figure) in FIGURES.items():
        inline, stored = figure(sides["inline"]), figure(sides["store"])
        results.append(shown(f"SGLang inline: {name}", inline, unit))
        results.append(shown(f"SGLang with the store: {name}", stored, unit))
        results.append(at_most(f"SGLang, store to inline: {name}", stored / inline, "x", 1.0))
    return results
