"""Codecs for a model's outputs: chosen from its configuration, never from values."""

from typing import Any

from radix_transfer_plugins.codecs.base import Codec
from radix_transfer_plugins.codecs.narrow import MAX_IDS, NarrowCodec
from radix_transfer_plugins.codecs.positions import PositionsCodec
from radix_transfer_plugins.codecs.raw import RawCodec

_EXPERT_COUNT_NAMES = ("num_experts", "n_routed_experts", "num_local_experts")


def routed_experts_codec(hf_text_config: Any) -> Codec:
    """Narrow by the number of routed experts; raw for a model that has none or more than two bytes hold."""
    for name in _EXPERT_COUNT_NAMES:
        count = getattr(hf_text_config, name, None)
        if isinstance(count, int) and 0 < count <= MAX_IDS:
            return NarrowCodec(count)
    return RawCodec()


def store_codecs(hf_text_config: Any) -> dict[str, Codec]:
    """By field of TokenOutputStash, for `OutputStore(codecs=...)`."""
    return {"routed_experts": routed_experts_codec(hf_text_config), "indexer_topk": PositionsCodec()}
