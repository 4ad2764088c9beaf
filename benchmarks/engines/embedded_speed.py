"""The embedded engine on one tiny Qwen3-MoE in float32: its tokens a second beside the model's own forward
step and transformers.generate, and what capturing routed experts costs. One thread; CPU seconds of the whole
process.
"""

import asyncio
import copy
from collections.abc import Callable

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.result import Result, at_least, at_most, shown
from benchmarks.timing import alternate
from radix_rl.engines.embedded.config import EmbeddedEngineConfig
from radix_rl.engines.embedded.engine import EmbeddedEngine
from radix_rl.types import GenerateRequest, SamplingParams

VOCAB = 1024
PROMPT_TOKENS = 16
NEW_TOKENS = 48
CONCURRENCY = (1, 8, 32, 64)


def tiny_model() -> PreTrainedModel:
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
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config).eval()


def prompts(count: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))


class EngineRun:
    """A started engine and an event loop to use it from plain functions."""

    def __init__(self, model: PreTrainedModel, *, capture: bool) -> None:
        self._capture = capture
        self._runner = asyncio.Runner()
        config = EmbeddedEngineConfig(
            dtype="float32",
            max_running_requests=max(CONCURRENCY),
            kv_cache_tokens=32768,
            enable_return_routed_experts=capture,
            num_threads=1,
        )
        self._engine = EmbeddedEngine(config, model=copy.deepcopy(model))
        self._runner.run(self._engine.start())

    def __call__(self, lengths: list[int]) -> None:
        self._runner.run(self._generate(lengths))

    async def _generate(self, lengths: list[int]) -> None:
        requests = [
            GenerateRequest(
                request_id=str(i),
                input_ids=tuple(ids),
                sampling=SamplingParams(max_new_tokens=length),
                return_routed_experts=self._capture,
            )
            for i, (ids, length) in enumerate(zip(prompts(len(lengths)).tolist(), lengths, strict=True))
        ]
        await asyncio.gather(*[self._engine.generate(request) for request in requests])

    def close(self) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()


def forward_steps(model: PreTrainedModel, count: int) -> Callable[[], None]:
    """The bound: a prefill and one forward step a token, nothing else."""

    @torch.inference_mode()
    def run() -> None:
        cache = DynamicCache(config=model.config)
        model(input_ids=prompts(count), past_key_values=cache, logits_to_keep=1)
        token = torch.zeros(count, 1, dtype=torch.int64)
        for _ in range(NEW_TOKENS - 1):
            model(input_ids=token, past_key_values=cache)

    return run


def transformers_generate(model: PreTrainedModel, count: int, new_tokens: int) -> None:
    model.generate(
        prompts(count), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=True, top_k=0
    )


def run() -> list[Result]:
    torch.set_num_threads(1)
    model = tiny_model()
    with_capture, without = EngineRun(model, capture=True), EngineRun(model, capture=False)
    results: list[Result] = []
    try:
        for count in CONCURRENCY:
            equal = [NEW_TOKENS] * count
            seconds = alternate(
                {
                    "forward": forward_steps(model, count),
                    "engine": lambda equal=equal: with_capture(equal),
                    "plain": lambda equal=equal: without(equal),
                },
                repetitions=5,
            )
            rate = count * NEW_TOKENS / seconds["engine"]
            results += [
                shown(f"embedded engine: output tokens per CPU second at {count}", rate, "tokens/s"),
                at_least(
                    f"embedded engine: of the forward step's bound at {count}",
                    seconds["forward"] / seconds["engine"],
                    "ratio",
                    0.75,
                ),
            ]
        # The last concurrency has the most to capture.
        results.append(
            at_most(
                "embedded engine: cost of capture", seconds["engine"] / seconds["plain"] - 1, "ratio", 0.05
            )
        )
        results += beside_generate(model, with_capture)
    finally:
        with_capture.close()
        without.close()
    return results


def beside_generate(model: PreTrainedModel, engine: EngineRun) -> list[Result]:
    """Useful tokens a second; generate runs every row to the longest one's end."""
    ragged = np.random.default_rng(0).integers(16, 257, 32).tolist()
    seconds = alternate(
        {
            "engine equal": lambda: engine([NEW_TOKENS] * 32),
            "generate equal": lambda: transformers_generate(model, 32, NEW_TOKENS),
            "engine ragged": lambda: engine(ragged),
            "generate ragged": lambda: transformers_generate(model, 32, max(ragged)),
        },
        repetitions=3,
    )
    equal = seconds["generate equal"] / seconds["engine equal"]
    unequal = seconds["generate ragged"] / seconds["engine ragged"]
    return [
        at_least("embedded engine / generate: equal lengths at 32", equal, "ratio", 1.2),
        at_least("embedded engine / generate: 16 to 256 tokens at 32", unequal, "ratio", 2.0),
    ]
