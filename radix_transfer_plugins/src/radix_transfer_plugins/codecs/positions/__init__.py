"""Codecs of sets of key positions, which sparse-attention indexers choose.

codec.py     both codecs: flags for whole causal prefixes, then a payload for each other set
forms.py     how one set is stored: as bits, as counts and low parts by block, or as a list
"""

from radix_transfer_plugins.codecs.positions.codec import PositionBlocksCodec, PositionsCodec

__all__ = ["PositionBlocksCodec", "PositionsCodec"]
