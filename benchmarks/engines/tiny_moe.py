"""The model of the embedded engine's benchmarks, and ways to run it.

In the engine, by plain forward steps, by transformers.generate.
"""

import asyncio
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, Self

import torch
from transformers import DynamicCache, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from radix_rl.config.output_store import OutputStoreConfig
from radix_rl.engines.embedded.config import EmbeddedEngineSetup
from radix_rl.engines.embedded.engine import EmbeddedEngine
from radix_rl.types import GenerateRequest, SamplingParams

VOCAB = 1024
PROMPT_TOKENS = 16
NEW_TOKENS = 64

Outputs = Literal["none", "inline", "store"]
"""How routed experts reach the caller, if at all."""


def tiny_model() -> PreTrainedModel:
    """Qwen3-MoE of 4 layers, hidden size 128 and 8 experts, in float32. It knows no end token."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config).float().eval()


def prompts(count: int, tokens: int = PROMPT_TOKENS) -> torch.Tensor:
    """`[count, tokens]`, no two alike."""
    return torch.randint(0, VOCAB, (count, tokens), generator=torch.Generator().manual_seed(1))


@contextmanager
def saved(model: PreTrainedModel) -> Iterator[str]:
    """A folder that holds the model."""
    with tempfile.TemporaryDirectory(prefix="radix-bench-model-") as folder:
        model.save_pretrained(folder)
        yield folder


class EngineRun:
    """A started engine and an event loop to use it from plain functions."""

    def __init__(
        self,
        model: PreTrainedModel,
        outputs: Outputs,
        *,
        prefix_cache_tokens: int,
        shortcuts: Literal["auto", "off"] = "auto",
        before_pass: Callable[[], None] | None = None,
    ) -> None:
        """`before_pass` is called before each forward pass of the engine's own copy of the model."""
        self._outputs = outputs
        self._ending = ExitStack()
        target = None
        if outputs == "store":
            folder = self._ending.enter_context(
                tempfile.TemporaryDirectory(prefix="radix-bench-", dir="/dev/shm")
            )
            config = {"directory": str(Path(folder)), "key_prefix": "bench/outputs"}
            target = OutputStoreConfig(backend="shared_memory", config=config)
        self._runner = self._ending.enter_context(asyncio.Runner())
        self._engine = EmbeddedEngine(
            EmbeddedEngineSetup(
                # Loaded by the engine, as in a run: a model object that it is given gets no shortcuts.
                model_path=self._ending.enter_context(saved(model)),
                shortcuts=shortcuts,
                dtype="float32",
                max_running_requests=64,
                kv_cache_tokens=32768,
                prefix_cache_tokens=prefix_cache_tokens,
                enable_return_routed_experts=outputs != "none",
                output_store=target,
                num_threads=1,
            )
        )
        self._runner.run(self._engine.start())
        if before_pass is not None:
            loaded = self._engine._core_now().runner.model
            loaded.register_forward_pre_hook(lambda *_: before_pass())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._engine.close())
        self._ending.close()

    def __call__(
        self, lengths: list[int], concurrency: int | None = None, outputs: Outputs | None = None
    ) -> None:
        """Answers of these lengths, `concurrency` requests at a time (None: all at once).

        `outputs`: what they ask for; None: what the engine is made for.
        """
        self._runner.run(self._generate(lengths, concurrency or len(lengths), outputs or self._outputs))

    async def _generate(self, lengths: list[int], concurrency: int, outputs: Outputs) -> None:
        requests = [
            GenerateRequest(
                request_id=str(i),
                input_ids=tuple(ids),
                sampling=SamplingParams(max_new_tokens=length),
                return_routed_experts=outputs != "none",
                return_outputs_via_store=outputs == "store",
            )
            for i, (ids, length) in enumerate(zip(prompts(len(lengths)).tolist(), lengths, strict=True))
        ]
        waiting = iter(requests)
        await asyncio.gather(*[self._client(waiting) for _ in range(concurrency)])

    async def _client(self, waiting: Iterable[GenerateRequest]) -> None:
        for request in waiting:
            answer = await self._engine.generate(request)
            assert len(answer.output_ids) == request.sampling.max_new_tokens


def forward_steps(model: PreTrainedModel, count: int) -> Callable[[], None]:
    """The bound: the prompts' forward pass and one forward step a token, nothing else."""

    # Unlike each other, as sampled tokens are: equal ones would all go to the same experts.
    tokens = torch.randint(0, VOCAB, (NEW_TOKENS - 1, count, 1), generator=torch.Generator().manual_seed(2))

    @torch.inference_mode()
    def run() -> None:
        cache = DynamicCache(config=model.config)
        model(input_ids=prompts(count), past_key_values=cache, logits_to_keep=1)
        for token in tokens:
            model(input_ids=token, past_key_values=cache)

    return run


def transformers_generate(model: PreTrainedModel, input_ids: torch.Tensor, new_tokens: int) -> None:
    model.generate(input_ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=True, top_k=0)
