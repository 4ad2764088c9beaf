"""Finds the routers of a model and hooks them."""

import re

import torch

from radix_rl.engines.embedded.capture.routers.base import RouterAdapter
from radix_rl.engines.embedded.capture.routers.experts_call import ExpertsCallAdapter
from radix_rl.engines.embedded.capture.routers.router_scores import RouterScoresAdapter
from radix_rl.errors import ConfigurationError

_ADAPTERS: list[RouterAdapter] = [ExpertsCallAdapter(), RouterScoresAdapter()]

_LOOKS_LIKE_ROUTING = re.compile(
    r"(Router|TopK\w*Gate|MoE\w*Gate|MoeGate|Experts|SparseMoe\w*|MoeBlock|MoE)$"
)


def register_router_adapter(adapter: RouterAdapter) -> None:
    """Teach the engine a router interface; later adapters are asked first. A name that is taken is
    refused.
    """
    if adapter.name in router_adapter_names():
        raise ValueError(
            f"router adapter {adapter.name!r} is registered already; known: {router_adapter_names()}"
        )
    _ADAPTERS.insert(0, adapter)


def router_adapter_names() -> list[str]:
    return [adapter.name for adapter in _ADAPTERS]


def find_routers(
    layers: torch.nn.ModuleList, num_experts: int
) -> dict[int, tuple[RouterAdapter, torch.nn.Module]]:
    """Layer number -> its adapter and module, over the decoder layers of the target model only.

    Layers without routing are absent. A layer that seems to route but matches no adapter, or matches twice,
    is refused: rows with holes would be taken for the truth.
    """
    found: dict[int, tuple[RouterAdapter, torch.nn.Module]] = {}
    for index, layer in enumerate(layers):
        matches = [
            (adapter, module) for module in layer.modules() if (adapter := _adapter_for(module)) is not None
        ]
        if len(matches) > 1:
            names = [type(module).__name__ for _, module in matches]
            raise ConfigurationError(
                f"layer {index}: expected one module that tells the chosen experts, got {names}; register an "
                "adapter "
                "that matches one of them (docs/engine-embedded.md)"
            )
        if matches:
            found[index] = matches[0]
            continue
        unknown = [type(m).__name__ for m in layer.modules() if _seems_to_route(m, num_experts)]
        if unknown:
            raise ConfigurationError(
                f"layer {index}: routed experts were asked for, but no adapter knows the router of "
                f"{unknown}; known "
                f"interfaces: {router_adapter_names()}. Write a RouterAdapter and pass it to "
                "register_router_adapter "
                "(docs/engine-embedded.md), or leave enable_return_routed_experts off"
            )
    return found


def _seems_to_route(module: torch.nn.Module, num_experts: int) -> bool:
    """By its name, or because it holds one network, or one matrix, for each expert."""
    if _LOOKS_LIKE_ROUTING.search(type(module).__name__):
        return True
    if isinstance(module, torch.nn.ModuleList) and len(module) == num_experts:
        return True
    return any(p.dim() == 3 and len(p) == num_experts for p in module.parameters(recurse=False))


def _adapter_for(module: torch.nn.Module) -> RouterAdapter | None:
    for adapter in _ADAPTERS:
        if adapter.matches(module):
            return adapter
    return None
