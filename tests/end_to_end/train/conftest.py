"""A tiny mixture-of-experts model on disk, and what trains and serves it.

An environment that it can learn, a configuration, and servers.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    GlmMoeDsaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from radix_rl.config import RunConfig, parse_config
from radix_rl.rollout.environments.base import Environment, Problem

VOCABULARY = 48
END = 1
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "eos_token_id": END,
    "pad_token_id": 0,
}


class LikesEvenTokens(Environment):
    """Rewards the share of even token ids: any policy-gradient step in the right direction shows."""

    def train_problem(self, index: int) -> Problem:
        ids = tuple(2 + (index * 7 + place * 5) % (VOCABULARY - 2) for place in range(3 + index % 4))
        return Problem(problem_id=f"p{index}", prompt_ids=ids, answer=None)

    def eval_problems(self) -> list[Problem]:
        return [self.train_problem(10_000 + index) for index in range(8)]

    def score(self, problem: Problem, output_ids: tuple[int, ...], text: str) -> float:
        return sum(token % 2 == 0 for token in output_ids) / max(len(output_ids), 1)


@pytest.fixture
def environment() -> Environment:
    return LikesEvenTokens()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four MoE layers, 8 experts, top-2."""
    config = Qwen3MoeConfig(
        **SHAPE,
        num_key_value_heads=2,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        head_dim=8,
        num_experts=8,
        norm_topk_prob=True,
    )
    return _saved(config, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def sparse_attention_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-MoE-DSA: a dense layer, two MoE layers, and an indexer that keeps 4 keys.

    The second layer shares the first one's choice.
    """
    config = GlmMoeDsaConfig(
        **SHAPE,
        num_key_value_heads=4,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        n_routed_experts=8,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        index_topk=4,
        index_n_heads=32,
        index_head_dim=8,
        indexer_types=["full", "shared", "full"],
    )
    return _saved(config, tmp_path_factory.mktemp("sparse-attention-model"))


def _saved(config: PreTrainedConfig, path: Path) -> Path:
    """Random weights that are large enough for routers to have opinions, and a tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w0").save_pretrained(path)
    return path


@pytest.fixture
def make_config(tmp_path: Path, model_path: Path) -> Callable[..., RunConfig]:
    """A run of 2 steps in float32 through the shared_memory store, with sections overridden by table."""

    def make(**sections: Any) -> RunConfig:
        table: dict[str, Any] = {
            "output_dir": str(tmp_path / "run"),
            "model": {"path": str(model_path)},
            "environment": {"type": "arithmetic"},
            "engine": {"type": "embedded", "dtype": "float32", "kv_cache_tokens": 2048, "context_length": 64},
            "output_store": {"backend": "shared_memory", "read_buffer_bytes": "1mb"},
            "rollout": {
                "prompts_per_step": 4,
                "samples_per_prompt": 4,
                "sampling": {"max_new_tokens": 12},
            },
            "optimizer": {"lr": 3e-3},
            "train": {"steps": 2, "microbatch_tokens": 128, "num_threads": 1},
        }
        for name, values in sections.items():
            other_variant = isinstance(values, dict) and "type" in values
            keep = {} if other_variant else table.get(name, {})
            table[name] = {**keep, **values} if isinstance(values, dict) else values
        return parse_config(table, source="test")

    return make


class Server:
    """A running `radix-rl serve` in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url


@pytest.fixture
def serve(model_path: Path, tmp_path: Path) -> Iterator[Callable[..., list[Server]]]:
    """Starts servers side by side, float32 with routed experts, and stops them afterwards."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(number: int, *options: str) -> list[Server]:
        command = [
            sys.executable,
            "-c",
            "from radix_rl.cli.main import main; main()",
            "serve",
            str(model_path),
        ]
        command += ["--port", "0", "--dtype", "float32", "--device", "cpu", "--num-threads", "1"]
        command += ["--kv-cache-tokens", "2048", "--enable-return-routed-experts", *options]
        first = len(processes)
        logs = [tmp_path / f"server-{first + index}.log" for index in range(number)]
        for path in logs:
            with path.open("wb") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        return [
            Server(process, _url_of(process, log))
            for process, log in zip(processes[first:], logs, strict=True)
        ]

    yield start
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _url_of(process: subprocess.Popen[bytes], log: Path) -> str:
    ends = time.monotonic() + 120
    while time.monotonic() < ends and process.poll() is None:
        if found := re.search(r"ready .*(http://127\.0\.0\.1:\d+)", log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")
