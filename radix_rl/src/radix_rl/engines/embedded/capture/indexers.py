"""Hooks on indexers, which record the key positions that were kept.

Sparse-attention models: DeepSeek-V3.2, GLM-MoE-DSA.
"""

from typing import Any

import torch

from radix_rl.engines.embedded.cache.slots import SlotCache
from radix_rl.engines.embedded.capture.rows import RowCapture
from radix_rl.engines.embedded.step import recorded_step
from radix_rl.errors import ConfigurationError
from radix_rl.model_layers import find_indexers
from radix_rl.routers.base import Record

FIELD = "indexer_topk"


def attach_indexers(
    layers: torch.nn.ModuleList, index_topk: int, max_tokens: int, cache: SlotCache, device: torch.device
) -> RowCapture:
    """Positions are counted within the request, as the slots are; what lies beyond a token is -1."""
    indexers = find_indexers(layers)
    if not indexers:
        raise ConfigurationError("enable_return_indexer_topk: the model has no indexer; leave it off")
    capture = RowCapture(
        FIELD,
        layers=len(indexers),
        top_k=index_topk,
        largest_id=2**31 - 1,
        max_tokens=max_tokens,
        device=device,
    )
    capture.allocate(cache)
    for number, indexer in enumerate(indexers):
        record = capture.recorder(number)

        def hook(_module: torch.nn.Module, _args: Any, output: torch.Tensor, record: Record = record) -> None:
            step = recorded_step(FIELD)
            if step is not None:
                chosen = output.to(torch.int32)
                # Where fewer keys exist than may be kept, top-k fills up with masked ones.
                seen = torch.where(chosen <= step.positions[:, :, None], chosen, -1)
                # Ascending with -1 last: the order of a set carries no meaning, and equal sets should be
                # equal rows.
                ordered = torch.where(seen < 0, 2**31 - 1, seen).sort(dim=-1).values
                ordered = torch.where(ordered == 2**31 - 1, -1, ordered)
                record(ordered)

        indexer.register_forward_hook(hook)
    return capture
