"""Experts that are called with the chosen ids: `experts(hidden_states, top_k_index, top_k_weights)`.

The interface of transformers 5 for stacked expert weights: Qwen2/3-MoE, Mixtral, OLMoE, DeepSeek-V2/V3/V3.2,
GLM-4-MoE, gpt-oss, MiniMax-M2, Granite-MoE, Phi-MoE, Ernie 4.5 and others.
What is captured is what is computed with, whatever the router before it looks like; shared experts are other
modules and do not appear.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

from radix_rl.engines.embedded.capture.routers.base import Record, RouterAdapter

_INDEX_NAMES = frozenset({"top_k_index", "topk_indices", "router_indices", "selected_experts"})


class ExpertsCallAdapter(RouterAdapter):
    name: ClassVar[str] = "experts_call"

    def matches(self, module: torch.nn.Module) -> bool:
        if not hasattr(module, "is_transposed") or not hasattr(module, "has_gate"):
            return False
        parameters = list(inspect.signature(type(module).forward).parameters)
        return len(parameters) >= 3 and parameters[2] in _INDEX_NAMES

    def attach(self, module: torch.nn.Module, record: Record) -> None:
        index_name = list(inspect.signature(type(module).forward).parameters)[2]
        # Not a hook: torch calls a module that has any in a slower way, which a step of few tokens feels.
        module.forward = partial(_forward, module.forward, record, index_name)


def _forward(
    forward: Callable[..., torch.Tensor], record: Record, index_name: str, *args: Any, **kwargs: Any
) -> torch.Tensor:
    record(args[1] if len(args) > 1 else kwargs[index_name])
    return forward(*args, **kwargs)
