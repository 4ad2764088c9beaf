"""Where a Hugging Face causal LM keeps its decoder layers and what sits in them."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from radix_rl.errors import ConfigurationError


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The `num_hidden_layers` decoder layers of the model, in order.

    Layers beyond them (multi-token prediction) are left out. Raises ConfigurationError for a model without
    such a list.
    """
    count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    named = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) >= count
        and name.split(".")[-1] in ("layers", "h")
    ]
    if not named:
        raise ConfigurationError(f"{type(model).__name__}: found no list of {count} decoder layers")
    layers = min(named, key=lambda item: item[0].count("."))[1]
    return layers[:count]  # type: ignore[return-value]


def longest_without_switch(text_config: Any) -> int | None:
    """The most tokens of a sequence whose rotary frequencies do not depend on how long it is.

    Phi-3's "longrope" takes other factors for all positions of a longer sequence, and "dynamic" frequencies
    grow with it: what is cached of a shorter one, or computed beside it, would be wrong. None: they never do.
    """
    parameters = getattr(text_config, "rope_parameters", None) or {}
    limits = []
    for each in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind = each.get("rope_type") or ""
        if kind == "longrope":
            limits.append(int(each["original_max_position_embeddings"]))
        elif "dynamic" in kind:
            limits.append(int(text_config.max_position_embeddings))
    return min(limits, default=None)


def find_indexers(layers: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The indexers of sparse attention in layer order. Layers that reuse another layer's choice have none."""
    return [
        module
        for layer in layers
        for module in layer.modules()
        if type(module).__name__.endswith("Indexer") and hasattr(module, "index_topk")
    ]
