"""The embedded engine with routed experts captured, beside the model's own forward step and
transformers.generate; what capture, the store and the prefix cache cost. One thread; CPU seconds of the whole
process.
"""

from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.engines.tiny_moe import (
    NEW_TOKENS,
    EngineRun,
    Outputs,
    forward_steps,
    prompts,
    tiny_model,
    transformers_generate,
)
from benchmarks.result import Result, at_least, at_most, shown
from benchmarks.timing import median_ratio, take_turns

CONCURRENCY = (1, 8, 32, 64)
GENERATE_CONCURRENCY = 32
RAGGED_REQUESTS = 256
ROUNDS, COST_ROUNDS = 3, 10
"""Each with a model and engines of its own: where memory happens to lie is worth several percent, and stays
as it is for as long as a model lives.
"""

COSTS: dict[str, tuple[Outputs, int]] = {
    "plain": ("none", 0),
    "capture": ("inline", 0),
    "store": ("store", 0),
    "prefixes": ("inline", 16384),
}
"""Case -> outputs and tokens of prefix cache."""

Seconds = dict[str, list[float]]


def run() -> list[Result]:
    torch.set_num_threads(1)
    seconds: Seconds = {}
    for _ in range(ROUNDS):
        model = tiny_model()
        with EngineRun(model, "inline", prefix_cache_tokens=0) as engine:
            for measure in (equal_lengths, ragged_lengths):
                extend(seconds, measure(model, engine))
    for number in range(COST_ROUNDS):
        extend(seconds, costs(tiny_model(), list(COSTS) if number % 2 == 0 else list(reversed(COSTS))))
    return results(seconds)


def extend(seconds: Seconds, by: Seconds) -> None:
    for name, values in by.items():
        seconds.setdefault(name, []).extend(values)


def equal_lengths(model: PreTrainedModel, engine: EngineRun) -> Seconds:
    """The engine beside the forward step at every concurrency, at one of them also beside `generate`."""
    seconds: Seconds = {}
    for count in CONCURRENCY:
        cases = {
            f"forward {count}": forward_steps(model, count),
            f"engine {count}": partial(engine, [NEW_TOKENS] * count),
        }
        repetitions = 3
        if count == GENERATE_CONCURRENCY:
            input_ids = prompts(count)
            cases[f"generate {count}"] = partial(transformers_generate, model, input_ids, NEW_TOKENS)
            repetitions = 8
        seconds |= take_turns(cases, repetitions=repetitions)
    return seconds


def ragged_lengths(model: PreTrainedModel, engine: EngineRun) -> Seconds:
    """`generate` runs every row of its batch to the end of the longest, and the next batch after that."""
    count = GENERATE_CONCURRENCY
    lengths = np.random.default_rng(0).integers(16, 257, RAGGED_REQUESTS).tolist()
    batches = [lengths[start : start + count] for start in range(0, RAGGED_REQUESTS, count)]
    input_ids = prompts(count)

    def generate() -> None:
        for batch in batches:
            transformers_generate(model, input_ids, max(batch))

    cases = {
        "engine, ragged": partial(engine, lengths, concurrency=count),
        "generate, ragged": generate,
    }
    return take_turns(cases, repetitions=1, warm_up=False)


def costs(model: PreTrainedModel, order: list[str]) -> Seconds:
    """Of capture, of the store and of a prefix cache against an engine that captures nothing, at 32; engines
    built in this order.
    """
    lengths = [NEW_TOKENS] * 32
    with ExitStack() as stack:
        engines = {}
        for name in order:
            outputs, prefix_cache_tokens = COSTS[name]
            run = EngineRun(model, outputs, prefix_cache_tokens=prefix_cache_tokens)
            engines[name] = stack.enter_context(run)
        cases = {name: partial(engine, lengths) for name, engine in engines.items()}
        return take_turns(cases, repetitions=3)


def results(seconds: Seconds) -> list[Result]:
    def ratio(of: str, over: str) -> float:
        return median_ratio(seconds[of], seconds[over])

    found = []
    for count in CONCURRENCY:
        rate = count * NEW_TOKENS / float(np.median(seconds[f"engine {count}"]))
        share = ratio(f"forward {count}", f"engine {count}")
        found += [
            shown(f"embedded engine: output tokens per CPU second at {count}", rate, "tokens/s"),
            at_least(f"embedded engine: of the forward step's bound at {count}", share, "ratio", 0.75),
        ]
    for name, case, bar in (("capture", "capture", 0.05), ("capture and store", "store", 0.03)):
        cost = ratio(case, "plain") - 1
        found.append(at_most(f"embedded engine: cost of {name} at 32", cost, "ratio", bar))
    cost = ratio("prefixes", "capture") - 1
    found.append(shown("embedded engine: cost of a prefix cache, prompts of 16 tokens, at 32", cost, "ratio"))
    count = GENERATE_CONCURRENCY
    for name, of, over, bar in (
        (f"equal lengths at {count}", f"generate {count}", f"engine {count}", 1.2),
        (f"{RAGGED_REQUESTS} answers of 16 to 256 at {count}", "generate, ragged", "engine, ragged", 2.0),
    ):
        found.append(at_least(f"embedded engine / generate: {name}", ratio(of, over), "x", bar))
    return found
