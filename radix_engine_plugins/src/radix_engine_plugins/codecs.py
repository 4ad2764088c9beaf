"""What a model's configuration says of its replay outputs: how many experts, and how each field is stored.

Codecs are chosen from the configuration, never from values, so that every process of an engine chooses alike.
"""

from typing import Any

from radix_transfer_plugins import token_output_codecs
from radix_transfer_plugins.codecs.base import Codec
from radix_transfer_plugins.codecs.positions import PositionBlocksCodec
from radix_transfer_plugins.codecs.raw import RawCodec

EXPERT_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN_NAMES = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "top_k_experts",
)


def num_routed_experts(text_config: Any) -> int | None:
    """Routed experts of a layer; None for a model whose configuration names none."""
    return _first(text_config, EXPERT_COUNT_NAMES)


def experts_per_token(text_config: Any) -> int | None:
    """Routed experts that a layer chooses for a token; None if the configuration names no such number."""
    return _first(text_config, EXPERTS_PER_TOKEN_NAMES)


def num_indexer_positions(text_config: Any) -> int | None:
    """Key positions that sparse attention keeps for a token; None for a model without an indexer."""
    return _first(text_config, ("index_topk",))


def dense_layers(text_config: Any) -> frozenset[int]:
    """Layers that never route, of a model that has experts in others; counted over all decoder layers.

    By a list of layer types, by the number of dense layers at the start and the step after them (DeepSeek,
    GLM), or by a list of dense layers and the step between sparse ones (Qwen).
    """
    num_layers = _first(text_config, ("num_hidden_layers",)) or 0
    kinds = getattr(text_config, "mlp_layer_types", None)
    if kinds is not None and len(kinds) >= num_layers:
        return frozenset(layer for layer in range(num_layers) if kinds[layer] == "dense")
    first_sparse = _first(text_config, ("first_k_dense_replace",)) or 0
    every = _first(text_config, ("moe_layer_freq",)) or 1
    sparse_step = _first(text_config, ("decoder_sparse_step",)) or 1
    named = frozenset(getattr(text_config, "mlp_only_layers", None) or ())
    return frozenset(
        layer
        for layer in range(num_layers)
        if layer < first_sparse or layer % every or (layer + 1) % sparse_step or layer in named
    )


def store_codecs(text_config: Any) -> dict[str, Codec]:
    """Codecs by field of TokenOutputStash, for `OutputStore(codecs=...)`; absent fields are stored raw.

    `text_config`: the Hugging Face configuration of the decoder, as every engine holds it.
    """
    codecs = token_output_codecs(
        num_experts=num_routed_experts(text_config),
        num_layers=_first(text_config, ("num_hidden_layers",)),
        dense_layers=dense_layers(text_config),
        vocab_size=_first(text_config, ("vocab_size",)),
    )
    # An engine that captures positions has them as sets, however the configuration calls their number.
    return {**codecs, "indexer_topk": PositionBlocksCodec()}


def routed_experts_codec(text_config: Any) -> Codec:
    """The codec of routed experts alone, for rows that cross processes on their way to the store."""
    return store_codecs(text_config).get("routed_experts", RawCodec())


def _first(text_config: Any, names: tuple[str, ...]) -> int | None:
    """The first of these settings that is a positive integer."""
    for name in names:
        value = getattr(text_config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
