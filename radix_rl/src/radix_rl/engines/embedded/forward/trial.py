"""Trial steps at start: requests side by side, compared with a forward pass of each alone.

A family that computes a request's positions, masks or scales from the whole batch would answer wrongly beside
others; it is refused here, known or not.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from radix_rl.engines.embedded.cache.slots import SlotCache
from radix_rl.engines.embedded.forward.attention import ATTENTION_NAME
from radix_rl.engines.embedded.forward.runner import ModelRunner
from radix_rl.engines.embedded.step import ForwardStep, Segment
from radix_rl.errors import ConfigurationError

_LENGTHS = (6, 3)
"""Tokens of the two requests, of which the last is decoded."""
_STRIDE = 16
_LARGEST_ERROR = 0.01
"""Of a request's logits in float32, as a part of their spread. Rounding stays a thousand times below it."""
_LARGEST_HALF_ERROR = 0.1
"""The same in 16 bits."""
_LARGEST_OF_ROUNDING = 3.0
"""In 16 bits an error up to so many times that of the model's own rounding is no fault of the family.

Rounding grows with the number of layers, and routers may round to other experts.
"""


@torch.inference_mode()
def try_steps(runner: ModelRunner) -> None:
    """Raises ConfigurationError for a model that does not run in steps, or that mixes requests up."""
    name = type(runner.model).__name__
    tokens = [
        torch.arange(length, device=runner.device).mul(7).add(first + 1).remainder(runner.vocab_size)
        for first, length in enumerate(_LENGTHS)
    ]
    try:
        got = _side_by_side(runner, tokens)
        # The one implementation that knows caps and sinks.
        alone = _alone(runner, tokens, "eager")
    except Exception as error:
        raise ConfigurationError(f"{name} does not run in the embedded engine: {error}") from error
    error = _largest_error(got, alone)
    is_half = runner.model.dtype != torch.float32
    # Not the other way round: weights that are not finite are no fault of the family.
    if not error > (_LARGEST_HALF_ERROR if is_half else _LARGEST_ERROR):
        return
    if is_half and error <= _LARGEST_OF_ROUNDING * _rounding_error(runner, tokens, alone):
        return
    raise ConfigurationError(
        f"{name} does not run in the embedded engine: beside another request its logits differ from those "
        f"of the request alone by {error:.2g} of their spread, since it computes positions, masks or scales "
        'from the whole batch; use a server (engine.type = "remote") for this family'
    )


def _largest_error(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The larger of the requests' errors, as a part of the logits' spread; medians over tokens."""
    errors = []
    for own, other in zip(got, expected, strict=True):
        spread = (other - other.mean(dim=-1, keepdim=True)).norm(dim=-1).median()
        errors.append(float((own - other).norm(dim=-1).median() / spread))
    return max(errors)


def _rounding_error(runner: ModelRunner, tokens: list[torch.Tensor], alone: list[torch.Tensor]) -> float:
    """The error of passes whose attention differs in rounding alone; 0 if the family has no such."""
    try:
        return _largest_error(_alone(runner, tokens, "sdpa"), alone)
    except ValueError:
        # transformers' refusal of a family without this implementation.
        return 0.0


def _alone(runner: ModelRunner, tokens: list[torch.Tensor], attention: str) -> list[torch.Tensor]:
    """Logits `[tokens, vocab]` float32 of each request by a plain forward pass of its own."""
    with _transformers_attention(runner.model, attention):
        return [runner.model(input_ids=ids[None], use_cache=False).logits[0].float() for ids in tokens]


def _side_by_side(runner: ModelRunner, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits `[tokens, vocab]` float32 of each request, in memory of their own."""
    cache = SlotCache(capacity_tokens=_STRIDE * len(tokens), device=runner.device)
    layers = runner.new_layers(cache)
    cache.divide(_STRIDE, [])
    prompts = [ids[:-1] for ids in tokens]
    segments = [Segment(slot, 1, len(ids), len(ids)) for slot, ids in enumerate(prompts)]
    positions = [torch.arange(len(ids), device=runner.device) for ids in prompts]
    groups = [range(len(tokens))] if runner.mixes_lengths else [[slot] for slot in range(len(tokens))]
    outputs: list[torch.Tensor] = []
    for group in groups:
        step = ForwardStep(
            cache=cache,
            segments=[segments[slot] for slot in group],
            input_ids=torch.cat([prompts[slot] for slot in group])[None],
            positions=torch.cat([positions[slot] for slot in group])[None],
            slots=torch.cat([torch.full_like(prompts[slot], slot) for slot in group]),
        )
        logits = runner.run(step, layers)[0].float()
        outputs += logits.split([len(prompts[slot]) for slot in group])
    decoded = ForwardStep(
        cache=cache,
        segments=[Segment(0, len(tokens), 1, max(_LENGTHS))],
        input_ids=torch.stack([ids[-1:] for ids in tokens]),
        positions=torch.tensor([[len(ids)] for ids in prompts], device=runner.device),
        slots=torch.arange(len(tokens), device=runner.device),
    )
    last = runner.run(decoded, layers).float()
    return [torch.cat((first, row)) for first, row in zip(outputs, last, strict=True)]


@contextmanager
def _transformers_attention(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
