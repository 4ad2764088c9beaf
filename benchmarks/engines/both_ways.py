"""An engine's inline path against the output store: the same requests to one server, in alternating rounds.

A model of 24 MoE layers, top-16, prompts of at least 1024 tokens, and 16 requests at a time, which are sent
together; the next round begins when all are answered. The model is small, prompts repeat and one token is
asked for, so that as little of the time as can be is arithmetic, which is the same both ways, and the way of
the outputs shows: of 1024 rows a request, 1.6 MB of int32, or more. Rounds go inline, store, store, inline,
so that neither way always comes first.
"""

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
LAYERS, EXPERTS, TOP_K = 24, 32, 16
OUTPUT_TOKENS = 1
CONCURRENCY = 16
ROUNDS, MIN_ROUNDS = 40, 8
"""Each way: as many as fit into `ROUNDS_BUDGET_S`."""
ROUNDS_BUDGET_S = 200
START_TIMEOUT_S = 300
REQUEST_TIMEOUT_S = 120
LONGEST_HOLD_S = 0.002
"""The store path's share of one step of the event loop."""


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
    prompt_tokens: int
    """Of `body`'s prompt."""
    head_dim: int
    """Of the model: the smallest that the engine's attention takes."""
    front_end_alone: bool = False
    """Count the CPU seconds of the process that talks to clients, not of its children too."""


@dataclass
class Side:
    """What was seen of one way, over all its rounds."""

    response_bytes: list[int] = field(default_factory=list)
    latency_p50_s: list[float] = field(default_factory=list)
    """To the last byte of the answer. One figure a round, as all that follow."""
    latency_p99_s: list[float] = field(default_factory=list)
    server_cpu_s: list[float] = field(default_factory=list)
    """Per request."""
    client_cpu_s: list[float] = field(default_factory=list)
    """Per request, until the rows are arrays."""
    longest_stall_s: list[float] = field(default_factory=list)


@dataclass
class Measured:
    inline: Side
    store: Side
    longest_hold_s: float
    """CPU seconds that the store path took of the event loop's thread in one step."""


def prompt(num_tokens: int) -> list[int]:
    return [token % 256 for token in range(num_tokens)]


def measure(engine: Engine) -> Measured:
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="radix-bench-")))
        shared = Path(
            ending.enter_context(tempfile.TemporaryDirectory(prefix="radix-bench-", dir="/dev/shm"))
        )
        config = {"directory": str(shared), "key_prefix": "bench/outputs"}
        model = _save_model(folder / "model", engine.head_dim)
        probe = folder / "probe.log"
        server, url = _start_server(engine, model, config, probe, folder / "server.log")
        ending.callback(_stop, server)
        store = OutputStore(create_backend("shared_memory", config))
        ending.callback(store.close)
        ways: dict[str, tuple[bool, Callable[[dict[str, Any]], np.ndarray]]] = {
            "inline": (False, engine.rows_inline),
            "store": (True, lambda answer: _rows_stored(store, answer)),
        }
        limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
        client = ending.enter_context(httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits))
        pool = ending.enter_context(ThreadPoolExecutor(CONCURRENCY))
        round_ = _Round(engine, client, pool, server.pid, probe)
        # One request fills the prefix cache, so that the rounds meet it full.
        round_.run(*ways["inline"], Side(), num_requests=1)
        for via_store, rows in ways.values():
            round_.run(via_store, rows, Side())
        sides = {name: Side() for name in ways}
        started_s = time.monotonic()
        for number in range(ROUNDS):
            if number >= MIN_ROUNDS and time.monotonic() - started_s > ROUNDS_BUDGET_S:
                break
            for name in ("inline", "store") if number % 2 == 0 else ("store", "inline"):
                round_.run(*ways[name], sides[name])
        longest_hold_s = _longest_s(probe, "hold", started_s, time.monotonic())
        return Measured(sides["inline"], sides["store"], longest_hold_s)


@dataclass(frozen=True)
class _Round:
    engine: Engine
    client: httpx.Client
    pool: ThreadPoolExecutor
    server_pid: int
    probe: Path

    def run(
        self,
        via_store: bool,
        rows: Callable[[dict[str, Any]], np.ndarray],
        side: Side,
        num_requests: int = CONCURRENCY,
    ) -> None:
        content = json.dumps({**self.engine.body, "return_outputs_via_store": via_store}).encode()

        def ask(_: int) -> tuple[float, bytes]:
            started = time.perf_counter()
            response = self.client.post(
                self.engine.path, content=content, headers={"Content-Type": "application/json"}
            )
            latency_s = time.perf_counter() - started
            response.raise_for_status()
            return latency_s, response.content

        alone = self.engine.front_end_alone
        started_s, client_cpu_s = time.monotonic(), time.process_time()
        server_cpu_s = _cpu_s(self.server_pid, alone)
        answers = list(self.pool.map(ask, range(num_requests)))
        side.server_cpu_s.append((_cpu_s(self.server_pid, alone) - server_cpu_s) / num_requests)
        side.longest_stall_s.append(_longest_s(self.probe, "late", started_s, time.monotonic()))
        latencies_s = [latency_s for latency_s, _ in answers]
        side.latency_p50_s.append(float(np.quantile(latencies_s, 0.5)))
        side.latency_p99_s.append(float(np.quantile(latencies_s, 0.99)))
        for _, answer in answers:
            array = rows(json.loads(answer))
            assert array.shape == (self.engine.prompt_tokens + OUTPUT_TOKENS - 1, LAYERS, TOP_K)
            side.response_bytes.append(len(answer))
        side.client_cpu_s.append((time.process_time() - client_cpu_s) / num_requests)


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


def _longest_s(probe: Path, kind: str, start_s: float, end_s: float) -> float:
    """Of the probe's lines of this kind within a window."""
    lines = (line.split() for line in probe.read_text().splitlines())
    return max((float(s) for of, at, s in lines if of == kind and start_s <= float(at) <= end_s), default=0.0)


def _save_model(folder: Path, head_dim: int) -> Path:
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
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head_dim,
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


FIGURES: dict[str, tuple[str, Callable[[Side], float]]] = {
    "response bytes": ("bytes", lambda side: statistics.median(side.response_bytes)),
    "server CPU a request": ("s", lambda side: statistics.mean(side.server_cpu_s)),
    "client CPU a request": ("s", lambda side: statistics.mean(side.client_cpu_s)),
    "latency p50": ("s", lambda side: statistics.median(side.latency_p50_s)),
    "latency p99": ("s", lambda side: statistics.median(side.latency_p99_s)),
    "longest stall of the event loop": ("s", lambda side: statistics.median(side.longest_stall_s)),
}
"""Over all rounds: of CPU time, which comes in steps of 10 ms, the mean; of what another program can prolong,
the median."""


def compare(engine: Engine) -> list[Result]:
    """Each figure both ways, and their ratio, which must stay below one."""
    measured = measure(engine)
    results = []
    for name, (unit, figure) in FIGURES.items():
        inline, stored = figure(measured.inline), figure(measured.store)
        results.append(shown(f"{engine.name} inline: {name}", inline, unit))
        results.append(shown(f"{engine.name} with the store: {name}", stored, unit))
        results.append(at_most(f"{engine.name}, store to inline: {name}", stored / inline, "x", 1.0))
    name = f"{engine.name}: the event loop's longest hold by the store path"
    results.append(at_most(name, measured.longest_hold_s, "s", LONGEST_HOLD_S))
    return results
