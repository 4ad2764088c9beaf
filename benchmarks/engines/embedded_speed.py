"""The embedded engine with routed experts captured, beside the model's own forward step and
transformers.generate; what capture, the store and the prefix cache cost. One thread; CPU seconds of the whole
process.
"""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.engines.tiny_moe import (
    NEW_TOKENS,
    EngineRun,
    forward_steps,
    prompts,
    tiny_model,
    transformers_generate,
)
from benchmarks.result import Result, at_least, at_most, shown
from benchmarks.timing import median_ratio, take_turns

CONCURRENCY = (1, 8, 32, 64)
RAGGED_REQUESTS, RAGGED_CONCURRENCY = 128, 32
PREFIX_CACHE_TOKENS = 16384


def run() -> list[Result]:
    torch.set_num_threads(1)
    model = tiny_model()
    with EngineRun(model, "inline", prefix_cache_tokens=0) as engine:
        return [*beside_forward(model, engine), *costs(model, engine), *beside_generate(model, engine)]


def beside_forward(model: PreTrainedModel, engine: EngineRun) -> list[Result]:
    results = []
    for count in CONCURRENCY:
        seconds = take_turns(
            {"forward": forward_steps(model, count), "engine": lambda n=count: engine([NEW_TOKENS] * n)},
            repetitions=7,
        )
        rate = count * NEW_TOKENS / float(np.median(seconds["engine"]))
        share = median_ratio(seconds["forward"], seconds["engine"])
        results += [
            shown(f"embedded engine: output tokens per CPU second at {count}", rate, "tokens/s"),
            at_least(f"embedded engine: of the forward step's bound at {count}", share, "ratio", 0.75),
        ]
    return results


def costs(model: PreTrainedModel, engine: EngineRun) -> list[Result]:
    """Against an engine that captures nothing, at 32."""
    lengths = [NEW_TOKENS] * 32
    with (
        EngineRun(model, "none", prefix_cache_tokens=0) as plain,
        EngineRun(model, "store", prefix_cache_tokens=0) as store,
        EngineRun(model, "inline", prefix_cache_tokens=PREFIX_CACHE_TOKENS) as prefixes,
    ):
        seconds = take_turns(
            {
                "capture": lambda: engine(lengths),
                "plain": lambda: plain(lengths),
                "store": lambda: store(lengths),
                "prefixes": lambda: prefixes(lengths),
            },
            repetitions=15,
        )

    def cost(of: Sequence[float], over: Sequence[float]) -> float:
        return median_ratio(of, over) - 1

    return [
        at_most(
            "embedded engine: cost of capture at 32",
            cost(seconds["capture"], seconds["plain"]),
            "ratio",
            0.05,
        ),
        at_most(
            "embedded engine: cost of capture and store at 32",
            cost(seconds["store"], seconds["plain"]),
            "ratio",
            0.03,
        ),
        shown(
            "embedded engine: cost of a prefix cache, prompts of 16 tokens, at 32",
            cost(seconds["prefixes"], seconds["capture"]),
            "ratio",
        ),
    ]


def beside_generate(model: PreTrainedModel, engine: EngineRun) -> list[Result]:
    """`generate` runs every row of its batch to the end of the longest, and the next batch after that."""
    count = RAGGED_CONCURRENCY
    lengths = np.random.default_rng(0).integers(16, 257, RAGGED_REQUESTS).tolist()
    batches = [lengths[start : start + count] for start in range(0, RAGGED_REQUESTS, count)]
    input_ids = prompts(count)

    def generate_ragged() -> None:
        for batch in batches:
            transformers_generate(model, input_ids, max(batch))

    equal = take_turns(
        {
            "engine": lambda: engine([NEW_TOKENS] * count),
            "generate": lambda: transformers_generate(model, input_ids, NEW_TOKENS),
        },
        repetitions=7,
    )
    ragged = take_turns(
        {"engine": lambda: engine(lengths, concurrency=count), "generate": generate_ragged},
        repetitions=3,
        warm_up=False,
    )
    return [
        at_least(
            f"embedded engine / generate: equal lengths at {count}",
            median_ratio(equal["generate"], equal["engine"]),
            "x",
            1.2,
        ),
        at_least(
            f"embedded engine / generate: {RAGGED_REQUESTS} answers of 16 to 256 at {count}",
            median_ratio(ragged["generate"], ragged["engine"]),
            "x",
            2.0,
        ),
    ]
