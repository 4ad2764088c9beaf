"""The embedded engine beside the model's own forward step and transformers.generate.

Routed experts are captured; what capture, the store and the prefix cache cost is shown too. One thread; CPU
seconds of the whole process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from benchmarks.engines.tiny_moe import (
    NEW_TOKENS,
    EngineRun,
    Outputs,
    forward_steps,
    prompts,
    tiny_model,
    transformers_generate,
)
from benchmarks.lockstep import BeforePass, in_lockstep, kinds_in_lockstep
from benchmarks.result import Result, at_least, at_most, shown
from benchmarks.timing import Case, median_ratio, take_turns

CONCURRENCY = (1, 8, 32, 64)
BUSY = 32
"""Concurrency of everything but the share of the bound."""
RAGGED_ANSWERS = 512
"""Enough for the end, where ever fewer answers are left, to be a small part."""
ROUNDS = 3
"""Each with models and engines of its own: where memory happens to lie is worth a percent or two, and stays
as it is for as long as they live.
"""
KINDS: tuple[Outputs, ...] = ("none", "inline", "store")
PREFIX_CACHE_TOKENS = 16384

Seconds = dict[str, list[float]]


def run() -> list[Result]:
    seconds = shares_of_the_bound()
    equal = [NEW_TOKENS] * BUSY
    ragged = np.random.default_rng(0).integers(16, 257, RAGGED_ANSWERS).tolist()
    for number in range(ROUNDS):
        extend(seconds, kinds_in_lockstep(partial(outputs_case, equal), KINDS, repetitions=8))
        equal_cases = {
            "engine, equal": partial(engine_case, "inline", equal),
            "prefixes, equal": partial(engine_case, "inline", equal, prefix_cache_tokens=PREFIX_CACHE_TOKENS),
            "generate, equal": partial(generate_case, equal),
        }
        idle_cases = {
            "unasked, equal": partial(engine_case, "inline", equal, asked="none"),
            "without, equal": partial(engine_case, "none", equal),
        }
        for cases in (equal_cases, idle_cases):
            # Turns go round in one order, and whose turn a case's follows is worth a percent.
            names = list(cases) if number % 2 == 0 else list(reversed(cases))
            extend(seconds, in_lockstep({name: cases[name] for name in names}, repetitions=8))
        ragged_cases = {
            "engine, ragged": partial(engine_case, "inline", ragged),
            "generate, ragged": partial(generate_case, ragged),
        }
        extend(seconds, in_lockstep(ragged_cases, repetitions=1, warm_up=False))
    return results(seconds)


def extend(seconds: Seconds, by: Seconds) -> None:
    for name, values in by.items():
        seconds.setdefault(name, []).extend(values)


def shares_of_the_bound() -> Seconds:
    """The engine beside the forward step at every concurrency."""
    torch.set_num_threads(1)
    seconds: Seconds = {}
    for _ in range(ROUNDS):
        model = tiny_model()
        with EngineRun(model, "inline", prefix_cache_tokens=0) as engine:
            for count in CONCURRENCY:
                cases: dict[str, Case] = {
                    f"forward {count}": forward_steps(model, count),
                    f"engine {count}": partial(engine, [NEW_TOKENS] * count),
                }
                extend(seconds, take_turns(cases, repetitions=3))
    return seconds


@contextmanager
def engine_case(
    outputs: Outputs,
    lengths: list[int],
    before_pass: BeforePass,
    *,
    asked: Outputs | None = None,
    prefix_cache_tokens: int = 0,
) -> Iterator[Case]:
    """An engine made for these outputs; requests ask for `asked`, or for what it is made for."""
    torch.set_num_threads(1)
    with EngineRun(
        tiny_model(), outputs, prefix_cache_tokens=prefix_cache_tokens, before_pass=before_pass
    ) as engine:
        yield partial(engine, lengths, concurrency=BUSY, outputs=asked)


@contextmanager
def outputs_case(lengths: list[int], before_pass: BeforePass) -> Iterator[Callable[[Outputs], None]]:
    torch.set_num_threads(1)
    with EngineRun(tiny_model(), "store", prefix_cache_tokens=0, before_pass=before_pass) as engine:
        yield lambda outputs: engine(lengths, outputs=outputs)


@contextmanager
def generate_case(lengths: list[int], before_pass: BeforePass) -> Iterator[Case]:
    """`generate` runs every row of its batch to the end of the longest, and the next batch after that."""
    torch.set_num_threads(1)
    model = tiny_model()
    model.register_forward_pre_hook(lambda *_: before_pass())
    input_ids = prompts(BUSY)

    def case() -> None:
        for start in range(0, len(lengths), BUSY):
            transformers_generate(model, input_ids, max(lengths[start : start + BUSY]))

    yield case


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
    for name, kind, bar in (("capture", "inline", 0.05), ("capture and store", "store", 0.03)):
        cost = ratio(kind, "none") - 1
        found.append(at_most(f"embedded engine: cost of {name} at {BUSY}", cost, "ratio", bar))
    for name, case, over in (
        ("a capture that nobody asks anything of", "unasked", "without"),
        ("a prefix cache, prompts of 16 tokens,", "prefixes", "engine"),
    ):
        cost = ratio(f"{case}, equal", f"{over}, equal") - 1
        found.append(shown(f"embedded engine: cost of {name} at {BUSY}", cost, "ratio"))
    for name, case, bar in (
        (f"equal lengths at {BUSY}", "equal", 1.2),
        (f"{RAGGED_ANSWERS} answers of 16 to 256 at {BUSY}", "ragged", 2.0),
    ):
        of, over = f"generate, {case}", f"engine, {case}"
        found.append(at_least(f"embedded engine / generate: {name}", ratio(of, over), "x", bar))
    return found
