"""Experts that are called with the chosen ids: `experts(hidden_states, top_k_index, top_k_weights)`.

The interface of transformers 5 for stacked expert weights: Qwen2/3-MoE, Mixtral, OLMoE, DeepSeek-V2/V3/V3.2,
GLM-4-MoE, gpt-oss, MiniMax-M2, Granite-MoE, Phi-MoE, Ernie 4.5 and others.
What is recorded is what is computed with, whatever the router before it looks like; shared experts are other
modules and do not appear.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

from radix_rl.errors import ConfigurationError
from radix_rl.routers.base import Record, Router

_INDEX_NAMES = frozenset({"top_k_index", "topk_indices", "router_indices", "selected_experts"})


class ExpertsCall(Router):
    """Recognised by its experts: of the router before them nothing is known."""

    name: ClassVar[str] = "experts_call"

    def matches(self, module: torch.nn.Module) -> bool:
        return is_called_with_ids(module)

    def attach(self, layer: torch.nn.Module, module: torch.nn.Module, record: Record) -> None:
        record_calls(module, record)


def is_called_with_ids(module: torch.nn.Module) -> bool:
    """Whether these are stacked experts that are called with the chosen ids."""
    if not hasattr(module, "is_transposed") or not hasattr(module, "has_gate"):
        return False
    parameters = list(inspect.signature(type(module).forward).parameters)
    return len(parameters) >= 3 and parameters[2] in _INDEX_NAMES


def record_calls_in(layer: torch.nn.Module, record: Record) -> None:
    """Record at the one module of the layer whose experts are called with ids. Raises ConfigurationError."""
    found = [module for module in layer.modules() if is_called_with_ids(module)]
    if len(found) != 1:
        raise ConfigurationError(
            f"{type(layer).__name__}: expected one module of experts that are called with the chosen ids, "
            f"got {[type(module).__name__ for module in found]}"
        )
    record_calls(found[0], record)


def record_calls(experts: torch.nn.Module, record: Record) -> None:
    """Pass the ids of every call of `experts` to `record`."""
    index_name = list(inspect.signature(type(experts).forward).parameters)[2]
    # Not a hook: torch calls a module that has any in a slower way, which a step of few tokens feels.
    experts.forward = partial(_forward, experts.forward, record, index_name)


def _forward(
    forward: Callable[..., torch.Tensor], record: Record, index_name: str, *args: Any, **kwargs: Any
) -> torch.Tensor:
    record(args[1] if len(args) > 1 else kwargs[index_name])
    return forward(*args, **kwargs)
