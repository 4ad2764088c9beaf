"""Servers of real engines, unmodified, with the plugin beside them, on this machine's CPU."""

import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from radix_transfer_plugins import OutputStore, StoreRef, TokenOutputStash, create_backend, register_backend
from radix_transfer_plugins.responses import find_refs

HERE = Path(__file__).resolve().parent
PLUGIN_FOLDER = HERE / "sglang" / "plugin"
START_TIMEOUT_S = 600
"""20 to 60 s on a quiet machine of two cores."""
BUFFER_BYTES = 1 << 28


class Server:
    """A process in a session of its own, so that what it starts ends with it."""

    def __init__(self, command: list[str], environment: dict[str, str], url: str, log: Path) -> None:
        self.url = url
        self.log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def wait_until_healthy(self, path: str = "/health") -> "Server":
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"ended with {self.process.returncode} while starting:\n{self.log_tail()}")
            try:
                if httpx.get(self.url + path, timeout=5).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        pytest.fail(f"not healthy after {START_TIMEOUT_S} s:\n{self.log_tail()}")

    def post(self, path: str, body: dict[str, Any], timeout: float = 120) -> httpx.Response:
        try:
            return httpx.post(self.url + path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            error.add_note(self.log_tail())
            raise

    def generate(self, body: dict[str, Any]) -> Any:
        response = self.post("/generate", body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        lines = response.text.split("\n\n")
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line[:400] for line in lines[-40:])

    def stop(self, first: signal.Signals = signal.SIGTERM) -> None:
        for sign in (first, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
            except ProcessLookupError:
                break
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait(timeout=20)


_given_ports: set[int] = set()


def free_port() -> int:
    """Below the ports that the kernel gives to connections, so that none takes it before the server does."""
    while True:
        number = random.randrange(15_000, 30_000)
        with socket.socket() as probe:
            if number not in _given_ports and probe.connect_ex(("127.0.0.1", number)) != 0:
                _given_ports.add(number)
                return number


def interpreter_of(environment: str) -> str:
    """The environment is built on first use and when its inputs change."""
    command = [sys.executable, HERE / "environments" / "build.py", environment]
    folder = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return f"{folder}/bin/python"


@pytest.fixture(scope="session")
def sglang_python() -> str:
    return interpreter_of("sglang_cpu")


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return interpreter_of("vllm_cpu")


@pytest.fixture(scope="session")
def test_plugin() -> ModuleType:
    """What servers find on PYTHONPATH, here too, so that this process can read what `faulty` stored."""
    spec = importlib.util.spec_from_file_location(
        "radix_engine_test_plugin", PLUGIN_FOLDER / "radix_engine_test_plugin.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    register_backend(module.FaultyBackend)
    return module


@pytest.fixture(scope="session")
def with_test_plugin() -> dict[str, str]:
    """Environment variables by which servers find the test plugin and these sources.

    The environments may have been built from another checkout.
    """
    sources = [HERE.parents[1] / name / "src" for name in ("radix_engine_plugins", "radix_transfer_plugins")]
    return {"PYTHONPATH": os.pathsep.join(map(str, [PLUGIN_FOLDER, *sources]))}


@pytest.fixture(scope="session")
def save_tokenizer() -> Callable[[Path], int]:
    """Writes a tokenizer of single bytes; returns the size of its vocabulary."""

    def save(folder: Path) -> int:
        vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        for special in ("<eos>", "<pad>", "<user>", "<assistant>"):
            vocabulary[special] = len(vocabulary)
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
        fast.chat_template = "{% for m in messages %}<user>{{ m.content }}{% endfor %}<assistant>"
        fast.save_pretrained(folder)
        return len(vocabulary)

    return save


@pytest.fixture(scope="session")
def save_tiny_moe(
    tmp_path_factory: pytest.TempPathFactory, save_tokenizer: Callable[[Path], int]
) -> Callable[..., Path]:
    """`save_tiny_moe(**changes)`: a Qwen3-MoE of random float32 weights: 3 layers, 8 experts, top-2."""

    def save(**changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("tiny_moe")
        vocab_size = save_tokenizer(folder)
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=4096,
            norm_topk_prob=True,
            bos_token_id=None,
            eos_token_id=256,
            pad_token_id=257,
            initializer_range=0.2,
            **changes,
        )
        Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def tiny_moe(save_tiny_moe: Callable[..., Path]) -> Path:
    """All of its layers route."""
    return save_tiny_moe()


@pytest.fixture(scope="session")
def tiny_moe_dense_first(save_tiny_moe: Callable[..., Path]) -> Path:
    """Its first layer does not route."""
    return save_tiny_moe(mlp_only_layers=[0])


@pytest.fixture(scope="session")
def full_forward() -> Callable[[Path], Callable[[list[int]], np.ndarray]]:
    """`full_forward(model)(token_ids)`: experts `[tokens, layers, top_k]` int32.

    One Hugging Face forward in float32 over these tokens picks them; -1 in layers that do not route.
    """

    def of_model(folder: Path) -> Callable[[list[int]], np.ndarray]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        top_k, num_layers = model.config.num_experts_per_tok, model.config.num_hidden_layers
        routing = [layer for layer in range(num_layers) if layer not in model.config.mlp_only_layers]

        def experts(token_ids: list[int]) -> np.ndarray:
            with torch.no_grad():
                logits = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
            rows = np.full((len(token_ids), num_layers, top_k), -1, np.int32)
            for layer, scores in zip(routing, logits, strict=True):
                rows[:, layer] = scores.topk(top_k, dim=-1).indices.numpy()
            return rows

        return experts

    return of_model


@pytest.fixture(scope="session")
def experts_of_full_forward(
    tiny_moe: Path, full_forward: Callable[[Path], Callable[[list[int]], np.ndarray]]
) -> Callable[[list[int]], np.ndarray]:
    return full_forward(tiny_moe)


@pytest.fixture(scope="session")
def unused_models(sglang_python: str) -> str:
    """For SGLANG_DISABLED_MODEL_ARCHS: importing all 250 model files takes most of a server's start."""
    (folder,) = Path(sglang_python).parents[1].glob("lib/python*/site-packages/sglang/srt/models")
    names = {path.stem for path in folder.glob("*.py")} - {"qwen2_moe", "qwen3_moe", "glm4_moe"}
    return ",".join(sorted(names))


@pytest.fixture(scope="session")
def start_sglang(
    sglang_python: str, unused_models: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """`with start_sglang(model, *flags, environment={}) as server`: ready to serve, gone afterwards.

    `console`: by the command `sglang serve`, else by its module.
    """

    @contextmanager
    def start(
        model: Path, *flags: str, environment: dict[str, str] | None = None, console: bool = False
    ) -> Iterator[Server]:
        port = free_port()
        command = [sglang_python, "-m", "sglang.launch_server", "--model-path", str(model)]
        if console:
            command = [str(Path(sglang_python).parent / "sglang"), "serve", str(model)]
        command += [
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--dtype",
            "float32",
            "--disable-overlap-schedule",
        ]
        # Without the limit the cache takes most of the memory; without sleeping an idle scheduler takes a
        # core.
        command += ["--max-total-tokens", "20000", "--max-running-requests", "32", "--sleep-on-idle", *flags]
        quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1"}
        quiet["SGLANG_DISABLED_MODEL_ARCHS"] = unused_models
        # On a busy machine a worker imports for longer than the 5 s after which it would be replaced.
        quiet["SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT"] = str(START_TIMEOUT_S)
        log = tmp_path_factory.mktemp("sglang") / "server.log"
        server = Server(command, {**quiet, **(environment or {})}, f"http://127.0.0.1:{port}", log)
        try:
            yield server.wait_until_healthy()
        finally:
            server.stop()

    return start


VLLM_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "cpu_interpreter,radix_output_store",
}
"""`cpu_interpreter` is of the environment, for Model Runner V2 on a CPU."""


@pytest.fixture(scope="session")
def vllm_environment(with_test_plugin: dict[str, str]) -> dict[str, str]:
    """The command `vllm` asks for the version of a distribution of its name; the one for CPUs has another."""
    path = f"{with_test_plugin['PYTHONPATH']}{os.pathsep}{HERE / 'vllm' / 'console'}"
    return {**VLLM_ENVIRONMENT, "PYTHONPATH": path}


@pytest.fixture(scope="session")
def start_vllm(
    vllm_python: str, vllm_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """`with start_vllm(model, *flags, environment={}) as server`: ready to serve, gone afterwards.

    `console`: by the command `vllm serve`, else by its module.
    """

    @contextmanager
    def start(
        model: Path, *flags: str, environment: dict[str, str] | None = None, console: bool = False
    ) -> Iterator[Server]:
        port = free_port()
        command = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        if console:
            command = [str(Path(vllm_python).parent / "vllm"), "serve", str(model)]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
        command += ["--kv-cache-memory-bytes", str(64 << 20), *flags]
        log = tmp_path_factory.mktemp("vllm") / "server.log"
        server = Server(command, {**vllm_environment, **(environment or {})}, f"http://127.0.0.1:{port}", log)
        try:
            yield server.wait_until_healthy()
        finally:
            server.stop()

    return start


@pytest.fixture(scope="session")
def start_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """`start_process(command, url)`: any other server, gone after the session at the latest."""
    with ExitStack() as ending:

        def start(command: list[str], url: str, **environment: str) -> Server:
            server = Server(command, environment, url, tmp_path_factory.mktemp("process") / "process.log")
            ending.callback(server.stop)
            return server

        yield start


@pytest.fixture(scope="session")
def metric() -> Callable[[Server, str], float]:
    """`metric(server, name)`: a counter of the engine's own `/metrics`, whatever its labels."""

    def value(server: Server, name: str) -> float:
        lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
        (line,) = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return float(line.split()[-1])

    return value


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    """`wait_until(condition, timeout_s=300)`: fails the test when the condition does not come true."""

    def wait(condition: Callable[[], bool], timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s"
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def killed_client(wait_until: Callable[..., None]) -> Callable[..., None]:
    """`killed_client(url, path, body, kill_when)` sends a request and is killed.

    It is a process of its own, killed while it waits for the answer.
    """

    def run(url: str, path: str, body: dict[str, Any], kill_when: Callable[[], bool]) -> None:
        host, port = url.removeprefix("http://").split(":")
        program = f"""
import json, socket, time
body = json.dumps({body!r}).encode()
s = socket.create_connection(({host!r}, {port}))
head = ["POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {{len(body)}}"]
s.sendall("\\r\\n".join([*head, "", ""]).encode() + body)
time.sleep(600)
"""
        process = subprocess.Popen([sys.executable, "-c", program])
        try:
            wait_until(kill_when)
            assert process.poll() is None
        finally:
            process.kill()
            process.wait()

    return run


@pytest.fixture(scope="session")
def port() -> Callable[[], int]:
    return free_port


class Reader:
    """A trainer's side: reads what references name and deletes it."""

    def __init__(self, backend: str, config: dict[str, Any]) -> None:
        self.store = OutputStore(create_backend(backend, config))

    def take(self, answer: dict[str, Any]) -> tuple[StoreRef, TokenOutputStash]:
        """Of an answer, or a part of one, that has exactly one reference."""
        (ref,) = find_refs(answer)
        (stash,) = self.store.read_many(
            [(ref, list(ref.fields))], stash_type=TokenOutputStash, buffer_bytes=BUFFER_BYTES
        )
        self.store.delete_many([ref])
        return ref, stash

    def keys(self) -> list[str]:
        return [info.key for info in self.store.list_objects()]

    def is_empty_within(self, timeout_s: float) -> bool:
        """Discards run in the background."""
        deadline = time.monotonic() + timeout_s
        while self.keys() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.keys()

    def clear(self) -> list[str]:
        """What a test left behind, which is then gone: it is not the next test's fault too."""
        left = [] if self.is_empty_within(30) else self.keys()
        self.store.delete_objects(older_than_s=0)
        return left


@pytest.fixture(scope="session")
def open_reader() -> Iterator[Callable[[str, dict[str, Any]], Reader]]:
    with ExitStack() as ending:

        def open_(backend: str, config: dict[str, Any]) -> Reader:
            reader = Reader(backend, config)
            ending.callback(reader.store.close)
            return reader

        yield open_


@pytest.fixture(scope="session")
def store_config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("store")
    return {
        "directory": str(folder / "objects"),
        "faults": str(folder / "faults.json"),
        "key_prefix": "run-1/outputs",
    }


@pytest.fixture
def faults(store_config: dict[str, Any]) -> Iterator[Callable[..., None]]:
    """`faults(delay_s=..., hold=..., error=..., put=...)` for puts from now on; none after the test."""
    path = Path(store_config["faults"])

    def inject(**settings: Any) -> None:
        written = path.with_suffix(".new")
        written.write_text(json.dumps(settings))
        written.replace(path)

    yield inject
    path.unlink(missing_ok=True)


@pytest.fixture
def puts_begun(store_config: dict[str, Any]) -> Callable[[], int]:
    """Number of stashes whose put into the store of `store_config` began, since ever; again counts again."""
    path = Path(store_config["faults"]).with_suffix(".puts")
    return lambda: path.read_text().count("begun\n") if path.exists() else 0


@pytest.fixture
def puts_ended(store_config: dict[str, Any]) -> Callable[[], int]:
    """Of those begun, the number that are stored or have failed."""
    path = Path(store_config["faults"]).with_suffix(".puts")
    return lambda: path.read_text().count("ended\n") if path.exists() else 0
