"""An engine's inline path against the output store: the same requests to one server, in alternating blocks.

A model of 24 MoE layers, top-8 of 64 experts, prompts of 2048 tokens and 16 requests at a time. Prompts
repeat, so that the prefix cache leaves little arithmetic and the way of the outputs shows: over 2048 rows,
1.6 MB of int32 a request."""

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
from radix_transfer_plugins import OutputStore, TokenOutputStash, create_backend
from radix_transfer_plugins.responses import find_refs

ROOT = Path(__file__).resolve().parents[2]
LAYERS, EXPERTS, TOP_K = 24, 64, 8
PROMPT_TOKENS = 2048
PROMPT = [token % 256 for token in range(PROMPT_TOKENS)]
CONCURRENCY, BLOCKS, REQUESTS_A_BLOCK = 16, 3, 32
START_TIMEOUT_S = 900


@dataclass(frozen=True)
class Engine:
    """How to start and ask one engine."""

    name: str
    environment: str
    """Its environment, built by tests/engines/environments/build.py."""
    arguments: Callable[[Path, int, dict[str, Any]], list[str]]
    """Of its interpreter, from the model, the port and the configuration of a shared_memory store."""
    variables: Callable[[Path], dict[str, str]]
    """Environment variables, from the environment's folder."""
    path: str
    body: dict[str, Any]
    """Of a request that is answered inline."""
    rows_inline: Callable[[dict[str, Any]], np.ndarray]
    output_tokens: int
    """That `body` asks for."""
    front_end_alone: bool = False
    """Count the CPU seconds of the process that talks to clients, not of its children too."""
    in_rounds: bool = False
    """Send the next requests when all of the last ones are answered, so that the engine batches both ways
    alike; else each when one is answered."""
    latency_has_bar: bool = True
    """False: the engine's own time varies by more than the two ways differ."""


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


def measure(engine: Engine) -> dict[str, Side]:
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="radix-bench-")))
        shared = Path(
            ending.enter_context(tempfile.TemporaryDirectory(prefix="radix-bench-", dir="/dev/shm"))
        )
        config = {"directory": str(shared), "key_prefix": "bench/outputs"}
        model = _save_model(folder / "model")
        probe = folder / "stalls.log"
        server, url = _start_server(engine, model, config, probe, folder / "server.log")
        ending.callback(_stop, server)
        store = OutputStore(create_backend("shared_memory", config))
        ending.callback(store.close)
        ways: dict[str, tuple[bool, Callable[[dict[str, Any]], np.ndarray]]] = {
            "inline": (False, engine.rows_inline),
            "store": (True, lambda answer: _rows_stored(store, answer)),
        }
        sides = {name: Side() for name in ways}

        def block(way: str, side: Side, num_requests: int) -> None:
            via_store, rows = ways[way]
            content = json.dumps({**engine.body, "return_outputs_via_store": via_store}).encode()
            _run_block(engine, url, content, server.pid, probe, rows, side, num_requests)

        for name in ways:
            block(name, Side(), CONCURRENCY)
        for _ in range(BLOCKS):
            for name in ways:
                block(name, sides[name], REQUESTS_A_BLOCK)
        return sides


def _run_block(
    engine: Engine,
    url: str,
    content: bytes,
    server_pid: int,
    probe: Path,
    rows: Callable[[dict[str, Any]], np.ndarray],
    side: Side,
    num_requests: int,
) -> None:
    def ask(client: httpx.Client) -> None:
        started = time.perf_counter()
        response = client.post(
            f"{url}{engine.path}", content=content, headers={"Content-Type": "application/json"}
        )
        latency_s = time.perf_counter() - started
        response.raise_for_status()
        array = rows(json.loads(response.content))
        assert array.shape == (PROMPT_TOKENS + engine.output_tokens - 1, LAYERS, TOP_K)
        side.latencies_s.append(latency_s)
        side.response_bytes.append(len(response.content))

    alone = engine.front_end_alone
    started_s, client_cpu_s, server_cpu_s = time.monotonic(), time.process_time(), _cpu_s(server_pid, alone)
    limits = httpx.Limits(max_connections=CONCURRENCY)
    with httpx.Client(timeout=900, limits=limits) as client, ThreadPoolExecutor(CONCURRENCY) as pool:
        at_once = CONCURRENCY if engine.in_rounds else num_requests
        for _ in range(0, num_requests, at_once):
            for future in [pool.submit(ask, client) for _ in range(at_once)]:
                future.result()
    side.client_cpu_s.append((time.process_time() - client_cpu_s) / num_requests)
    side.server_cpu_s.append((_cpu_s(server_pid, alone) - server_cpu_s) / num_requests)
    side.longest_stall_s.append(_longest_stall_s(probe, started_s, time.monotonic()))


def _rows_stored(store: OutputStore, answer: dict[str, Any]) -> np.ndarray:
    (ref,) = find_refs(answer)
    (stash,) = store.read_many([(ref, ["routed_experts"])], stash_type=TokenOutputStash, buffer_bytes=1 << 26)
    store.delete_many([ref])
    assert stash.routed_experts is not None
    return stash.routed_experts


def _cpu_s(pid: int, alone: bool) -> float:
    """Of a process and, unless `alone`, its children, which live as long as it does."""
    parent = psutil.Process(pid)
    children = [] if alone else parent.children(recursive=True)
    times = [process.cpu_times() for process in (parent, *children)]
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
        head_dim=32,
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
    engine: Engine, model: Path, config: dict[str, Any], probe: Path, log: Path
) -> tuple[subprocess.Popen, str]:
    builder = ROOT / "tests" / "engines" / "environments" / "build.py"
    built = subprocess.run(
        [sys.executable, builder, engine.environment], check=True, stdout=subprocess.PIPE, text=True
    )
    folder = Path(built.stdout.strip())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(folder / "bin" / "python"), *engine.arguments(model, port, config)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).parent / "loop_probe"),
        "RADIX_LOOP_PROBE": str(probe),
        **engine.variables(folder),
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


def compare(engine: Engine) -> list[Result]:
    """Each figure both ways, and their ratio, which must stay below one unless it is shown only."""
    sides = measure(engine)
    results = []
    for name, (unit, figure) in FIGURES.items():
        inline, stored = figure(sides["inline"]), figure(sides["store"])
        results.append(shown(f"{engine.name} inline: {name}", inline, unit))
        results.append(shown(f"{engine.name} with the store: {name}", stored, unit))
        ratio = f"{engine.name}, store to inline: {name}"
        if name.startswith("latency") and not engine.latency_has_bar:
            results.append(shown(ratio, stored / inline, "x"))
        else:
            results.append(at_most(ratio, stored / inline, "x", 1.0))
    return results
