"""Rotary position embeddings in half of the operations that transformers' functions take."""

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Of queries and keys `[b, heads, S, d]` by cosines and sines `[b, S, d]`."""

_NAME = "apply_rotary_pos_emb"


def use_short_rotary(model: torch.nn.Module) -> None:
    """In modules whose forward function calls one of transformers' that is seen to give the same bits.

    The function itself stays as it is, for other models.
    """
    shorts: dict[Rotary, _ShortRotary] = {}
    for module in model.modules():
        forward = type(module).forward
        if "forward" in vars(module) or not isinstance(forward, FunctionType):
            continue
        theirs = forward.__globals__.get(_NAME)
        if _NAME not in forward.__code__.co_names or theirs is None or not _is_the_usual(theirs):
            continue
        short = shorts.setdefault(theirs, _ShortRotary(theirs))
        module.forward = MethodType(_with_global(forward, _NAME, short), module)


class _ShortRotary:
    """What it makes of a step's cosines and sines serves all layers."""

    def __init__(self, theirs: Rotary) -> None:
        self._theirs = theirs
        self._made: tuple[torch.Tensor, ...] = ()
        """Cosines and sines as they came, and as they are used."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = sin.shape[-1]
        same_shape = q.shape[-1] == k.shape[-1] == width
        # Some functions multiply in the cosines' dtype and round afterwards.
        same_dtype = q.dtype == k.dtype == cos.dtype == sin.dtype
        if torch.is_grad_enabled() or unsqueeze_dim != 1 or not same_shape or not same_dtype:
            return self._theirs(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        half = width // 2
        # Read and set as one: a copy of the model, which shares this object, may run in another thread.
        made = self._made
        if not made or made[0] is not cos or made[1] is not sin:
            # The halves change places, and the one that comes first changes its sign: here its sines do.
            signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
            made = self._made = cos, sin, cos.unsqueeze(1), signed.unsqueeze(1)
        _, _, cos, sin = made
        return (
            torch.mul(q, cos).add_(torch.roll(q, half, -1).mul_(sin)),
            torch.mul(k, cos).add_(torch.roll(k, half, -1).mul_(sin)),
        )


@cache
def _is_the_usual(theirs: Rotary) -> bool:
    if list(inspect.signature(theirs).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return False
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 4, 3, 16, generator=generator)
    cos, sin = torch.randn(2, 2, 3, 16, generator=generator)
    with torch.inference_mode():
        try:
            expected = theirs(q, k, cos, sin)
        except RuntimeError:
            # It wants other shapes.
            return False
        got = _ShortRotary(theirs)(q, k, cos, sin)
    return all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))


def _with_global(function: FunctionType, name: str, value: Any) -> FunctionType:
    """The same function where `name` means `value`."""
    names = {**function.__globals__, name: value}
    same = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    same.__kwdefaults__ = function.__kwdefaults__
    return same
