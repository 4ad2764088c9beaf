"""Finds the router of each layer of a model, for the engine and for the trainer."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from radix_engine_plugins.codecs import num_routed_experts
from radix_rl.errors import ConfigurationError
from radix_rl.model_layers import decoder_layers
from radix_rl.routers.base import ReplayedRouter, Router
from radix_rl.routers.registry import all_routers, router_names

_LOOKS_LIKE_ROUTING = re.compile(
    r"(Router|TopK\w*Gate|MoE\w*Gate|MoeGate|Experts|SparseMoe\w*|MoeBlock|MoE)$"
)


class FoundRouter(NamedTuple):
    """The router of one layer."""

    kind: Router
    module: torch.nn.Module
    """The one that the kind is recognised by."""


class FoundReplayedRouter(NamedTuple):
    """The router of one layer, of a kind that can be replayed."""

    kind: ReplayedRouter
    module: Any
    """The router itself, with `num_experts` and `top_k`."""


def find_routers(layers: torch.nn.ModuleList, num_experts: int | None) -> dict[int, FoundRouter]:
    """Layer number -> its router, over the decoder layers of the target model only.

    Layers without routing are absent. A layer that seems to route but is of no known kind, or matches twice,
    is refused: rows with holes would be taken for the truth. `num_experts`: of a layer, None if the model's
    configuration does not say. Raises ConfigurationError.
    """
    kinds = all_routers()
    found: dict[int, FoundRouter] = {}
    for index, layer in enumerate(layers):
        router = _router_of(index, layer, kinds)
        if router is not None:
            found[index] = router
            continue
        unknown = [type(m).__name__ for m in layer.modules() if _seems_to_route(m, num_experts)]
        if unknown:
            raise ConfigurationError(
                f"layer {index}: no known kind of router fits {unknown}; known: {', '.join(router_names())}. "
                "Teach it as docs/routers.md shows, or leave routed experts off"
            )
    return found


def find_replayed_routers(model: PreTrainedModel) -> dict[int, FoundReplayedRouter]:
    """Layer number, counted over the whole model, -> its router. Dense layers are absent.

    Layers beyond `num_hidden_layers` (multi-token prediction) are not looked at. Raises ConfigurationError
    for a layer whose router cannot be replayed, and for a model without any.
    """
    num_experts = num_routed_experts(model.config.get_text_config(decoder=True))
    layers = decoder_layers(model)
    found: dict[int, FoundReplayedRouter] = {}
    for index, (kind, module) in find_routers(layers, num_experts).items():
        if not isinstance(kind, ReplayedRouter):
            names = sorted({type(m).__name__ for m in layers[index].modules() if "Rout" in type(m).__name__})
            replayed = [each.name for each in all_routers() if isinstance(each, ReplayedRouter)]
            raise ConfigurationError(
                f"layer {index}: expected a router that can be replayed, got {names}, which is recorded only "
                f"({kind.name}); those that can: {', '.join(replayed)}. Teach it as docs/routers.md shows, "
                "or set train.replay_routed_experts=false"
            )
        found[index] = FoundReplayedRouter(kind, module)
    if not found:
        raise ConfigurationError(
            f"train.replay_routed_experts is on, but {type(model).__name__} has no routers; set it to false "
            "for a dense model"
        )
    return found


def _router_of(index: int, layer: torch.nn.Module, kinds: Sequence[Router]) -> FoundRouter | None:
    """The first kind that recognises a module of the layer, with that module."""
    for kind in kinds:
        matching = [module for module in layer.modules() if kind.matches(module)]
        if len(matching) > 1:
            names = [type(module).__name__ for module in matching]
            raise ConfigurationError(
                f"layer {index}: expected one module that router kind {kind.name!r} matches, got {names}; "
                "a kind that matches one of them can be added (docs/routers.md)"
            )
        if matching:
            return FoundRouter(kind, matching[0])
    return None


def _seems_to_route(module: torch.nn.Module, num_experts: int | None) -> bool:
    """By its name, or because it holds one network, or one matrix, for each expert."""
    if _LOOKS_LIKE_ROUTING.search(type(module).__name__):
        return True
    if num_experts is None:
        return False
    if isinstance(module, torch.nn.ModuleList) and len(module) == num_experts:
        return True
    return any(p.dim() == 3 and len(p) == num_experts for p in module.parameters(recurse=False))
