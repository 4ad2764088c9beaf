"""RMS norms in fewer operations than transformers' modules take."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""RMS norm of hidden states `[..., width]` by a weight `[width]` and an epsilon."""


def use_short_norms(model: torch.nn.Module) -> None:
    """Of modules that are seen to give the same bits."""
    found: dict[tuple[Any, ...], Norm | None] = {}
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", None)
        if not isinstance(eps, float) or not _is_plain(module):
            continue
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        kind = (type(module), eps, weight.shape, weight.dtype)
        if kind not in found:
            norms = [_torch_norm]
            width = weight.shape[0]
            # Only of powers of two: of other widths a sum times 1 / width may differ from the mean by a bit,
            # and rarely enough to be missed.
            if weight.device.type == "cpu" and width & (width - 1) == 0:
                norms.insert(0, _norm_of_few_operations)
            found[kind] = next((norm for norm in norms if _same(module, norm, eps)), None)
        norm = found[kind]
        if norm is not None:
            module.forward = partial(_rms_norm, module, norm, eps, weight.dtype)


def _is_plain(module: torch.nn.Module) -> bool:
    """One weight, one argument, and no forward function of this module's own."""
    names = [name for name, _ in module.named_parameters()]
    arguments = inspect.signature(type(module).forward).parameters
    return names == ["weight"] and len(arguments) == 2 and "forward" not in vars(module)


def _rms_norm(
    module: torch.nn.Module, norm: Norm, eps: float, seen: torch.dtype, hidden_states: torch.Tensor
) -> torch.Tensor:
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    if torch.is_grad_enabled() or not hidden_states.dtype == weight.dtype == seen:
        return type(module).forward(module, hidden_states)
    return norm(hidden_states, weight, eps)


def _torch_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(hidden_states, weight.shape, weight, eps)


def _norm_of_few_operations(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Of a width that is a power of two; torch's function takes more, on a CPU."""
    squares = torch.mul(hidden_states, hidden_states).sum(-1, keepdim=True)
    scales = torch.add(_cpu_scalar(eps, weight.dtype), squares, alpha=1 / weight.shape[0]).rsqrt_()
    return torch.mul(hidden_states, scales).mul_(weight)


@cache
def _cpu_scalar(value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype, device="cpu")


@torch.inference_mode()
def _same(module: torch.nn.Module, norm: Norm, eps: float) -> bool:
    """On random weights: the module's own may be all 1, as they start."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    other = torch.randn(weight.shape, generator=generator).to(weight)
    # From values that drown in eps to large ones.
    scales = torch.logspace(-5, 3, 16)[:, None, None]
    probe = (torch.randn(16, 4, *weight.shape, generator=generator) * scales).to(weight)
    own = torch.func.functional_call(module, {"weight": other}, probe)
    return torch.equal(own, norm(probe, other, eps))
