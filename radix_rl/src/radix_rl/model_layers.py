"""Where a Hugging Face causal LM keeps its decoder layers and what sits in them."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from radix_rl.errors import ConfigurationError


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The `num_hidden_layers` decoder layers of the model, in order; layers beyond them (multi-token
    prediction) are left out. Raises ConfigurationError for a model without such a list."""
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


def find_indexers(layers: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The indexers of sparse attention in layer order. Layers that reuse another layer's choice have none."""
    return [
        module
        for layer in layers
        for module in layer.modules()
        if type(module).__name__.endswith("Indexer") and hasattr(module, "index_topk")
    ]
