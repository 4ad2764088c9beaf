"""How an embedded engine's decode step grows with its context, beside attention.

32 requests with 64 and with 1024 tokens of context. The model's own forward step has a StaticCache of the
same length: like the engine's slots it is written in place. A DynamicCache would copy itself at every step,
which grows with the context too.
"""

from collections.abc import Callable
from statistics import median

import torch
from transformers import PreTrainedModel, StaticCache

from benchmarks.engines.tiny_moe import prompts, saved, tiny_model
from benchmarks.result import Result, at_most, shown
from benchmarks.timing import median_ratio, take_turns
from radix_rl.engines.embedded.build import build_core
from radix_rl.engines.embedded.config import EmbeddedEngineSetup
from radix_rl.engines.embedded.schedule.sequence import Sequence
from radix_rl.types import GenerateRequest, SamplingParams

REQUESTS = 32
SHORT, LONG = 64, 1024
ROUNDS = 3
"""Each with models, caches and engines of its own: where memory happens to lie is worth several percent."""
STEPS, REPETITIONS = 4, 7
"""Steps in one measurement; the context grows on from one to the next, on both sides alike."""
GROWTH = STEPS * (REPETITIONS + 1) + 8


def run() -> list[Result]:
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, values in one_round().items():
            seconds.setdefault(name, []).extend(values)

    def added_ms(side: str) -> float:
        pairs = zip(seconds[f"{side} {LONG}"], seconds[f"{side} {SHORT}"], strict=True)
        return 1e3 * median((long - short) / STEPS for long, short in pairs)

    def growth(side: str) -> float:
        return median_ratio(seconds[f"{side} {LONG}"], seconds[f"{side} {SHORT}"])

    engine, forward, attention = (added_ms(side) for side in ("engine", "forward", "attention"))
    of_engine, of_attention = growth("engine"), growth("attention")
    what = f"from {SHORT} to {LONG} tokens of context, {REQUESTS} requests"
    return [
        shown(f"attention kernel: growth {what}", of_attention, "x"),
        at_most(f"embedded engine: growth of a step {what}", of_engine, "x", of_attention),
        shown(f"embedded engine: CPU time added to a step {what}", engine, "ms"),
        at_most("embedded engine: of what the forward step adds", engine / forward, "ratio", 1.0),
        # Not only what the engine does: the keys drive the model's weights out of the processor's caches, so
        # that linear layers and experts take longer beside a long context too.
        shown("embedded engine: of what the attention kernel alone adds", engine / attention, "ratio"),
    ]


def one_round() -> dict[str, list[float]]:
    model = tiny_model()
    cases = {}
    for context in (SHORT, LONG):
        cases[f"forward {context}"] = forward_decode(model, context)
        cases[f"attention {context}"] = attention_alone(model, context)
        cases[f"engine {context}"] = engine_decode(tiny_model(), context)
    return take_turns(cases, repetitions=REPETITIONS)


def forward_decode(model: PreTrainedModel, context: int) -> Callable[[], None]:
    cache = StaticCache(config=model.config, max_cache_len=context + GROWTH)
    token = torch.zeros(REQUESTS, 1, dtype=torch.int64)
    with torch.inference_mode():
        model(input_ids=prompts(REQUESTS, context), past_key_values=cache, logits_to_keep=1)

    @torch.inference_mode()
    def run() -> None:
        for _ in range(STEPS):
            model(input_ids=token, past_key_values=cache)

    return run


def attention_alone(model: PreTrainedModel, context: int) -> Callable[[], None]:
    """torch's attention on a step's queries and keys, once for each layer."""
    config = model.config
    groups = config.num_attention_heads // config.num_key_value_heads
    query = torch.randn(REQUESTS, config.num_key_value_heads, groups, config.head_dim)
    length = context + GROWTH // 2
    key, value = torch.randn(2, config.num_hidden_layers, *query.shape[:2], length, config.head_dim)
    mask = torch.zeros(REQUESTS, 1, groups, length)

    @torch.inference_mode()
    def run() -> None:
        for _ in range(STEPS):
            for layer in range(config.num_hidden_layers):
                torch.nn.functional.scaled_dot_product_attention(query, key[layer], value[layer], mask)

    return run


def engine_config(folder: str, context: int) -> EmbeddedEngineSetup:
    return EmbeddedEngineSetup(
        model_path=folder,
        dtype="float32",
        kv_cache_tokens=REQUESTS * (context + GROWTH + 16),
        enable_return_routed_experts=True,
    )


def engine_decode(model: PreTrainedModel, context: int) -> Callable[[], None]:
    with saved(model) as folder:
        core = build_core(engine_config(folder, context), None, None)
    for i, ids in enumerate(prompts(REQUESTS, context).tolist()):
        request = GenerateRequest(
            request_id=str(i),
            input_ids=tuple(ids),
            sampling=SamplingParams(max_new_tokens=GROWTH),
            return_routed_experts=True,
        )
        core.submit(Sequence(request=request, seed=i, stop_token_ids=frozenset(), on_finish=lambda _: None))
    while core.scheduler.slots.num_decoding < REQUESTS:
        core.step()

    def run() -> None:
        for _ in range(STEPS):
            core.step()

    return run
