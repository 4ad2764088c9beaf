"""`ReplayCounts`: what replay adds up over the microbatches of a step."""

from dataclasses import dataclass


@dataclass
class ReplayCounts:
    """Token rows are those that something counted depends on."""

    token_layers: int = 0
    """Replayed token rows times routed layers."""
    disagreeing: int = 0
    """Of those, where the live top-k set differs from the recorded one."""
    rows: int = 0
    """Token rows in all."""
    unrecorded_rows: int = 0
    """Token rows without recorded experts, which were routed live."""
    indexer_token_layers: int = 0
    """Replayed token rows times indexers."""
    indexer_disagreeing: int = 0
    """Of those, where the live set of positions differs from the recorded one."""
