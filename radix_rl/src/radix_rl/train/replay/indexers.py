"""Indexer replay: sparse attention of one microbatch keeps the positions that the engine recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from radix_rl.errors import ConfigurationError, ReplayError
from radix_rl.model_layers import decoder_layers, find_indexers
from radix_rl.train.batch import TrainBatch
from radix_rl.train.replay.counts import ReplayCounts
from radix_rl.train.replay.hooked import Binding, HookedReplay

_NO_POSITION = 2**31 - 1
"""Takes the place of -1 where sets are compared: it sorts last."""


@dataclass(kw_only=True)
class _Positions(Binding):
    positions_btik: torch.Tensor
    """int32, each row filled up with its first position where fewer were kept; -1 throughout without a
    record."""
    ordered_btik: torch.Tensor
    """int32, ascending, `_NO_POSITION` where fewer were kept."""
    counted_bt: torch.Tensor
    """bool: replayed rows of real tokens."""


class IndexerReplay(HookedReplay[_Positions]):
    """Replays the positions that sparse attention kept."""

    kind: ClassVar[str] = "indexer"

    def __init__(self, model: PreTrainedModel) -> None:
        indexers = find_indexers(decoder_layers(model))
        if not indexers:
            raise ConfigurationError(
                f"train.replay_indexer_topk is on, but {type(model).__name__} has no indexer; set it to false"
            )
        super().__init__(dict(enumerate(indexers)))
        self._index_topk = int(model.config.get_text_config(decoder=True).index_topk)

    def _disagreeing(self, number: int, output: torch.Tensor, binding: _Positions) -> torch.Tensor:
        return (_differs(binding.ordered_btik[:, :, number], output) & binding.counted_bt).sum()

    def _replayed(
        self, number: int, module: torch.nn.Module, output: torch.Tensor, binding: _Positions
    ) -> torch.Tensor:
        recorded = binding.positions_btik[:, :, number]
        # A short batch has fewer keys than the indexer may keep: naming one twice changes nothing.
        missing = recorded.shape[-1] - output.shape[-1]
        live = torch.cat([output, output[..., :1].expand(-1, -1, missing)], dim=-1)
        chosen = torch.where(recorded >= 0, recorded, live.to(recorded.dtype))
        # Kept for the recomputation of a checkpointed layer, whose indexer may round to other positions.
        binding.positions_btik[:, :, number] = chosen
        return chosen.to(output.dtype)

    def _add_disagreeing(self, counts: ReplayCounts, number: int) -> None:
        counts.indexer_disagreeing += number

    def _bind(self, batch: TrainBatch, counts: ReplayCounts) -> _Positions:
        rows = batch.indexer_topk_btik
        if rows is None:
            raise ReplayError(
                "indexer replay is on, but the samples carry no indexer_topk; the engine must return it "
                "(--enable-return-indexer-topk)"
            )
        self._check(rows, batch.names)
        token = torch.arange(rows.shape[1], device=rows.device)
        kept_bti = (rows >= 0).sum(dim=-1)
        # A token sees itself and those before it, and an indexer keeps as many of them as it may.
        present_bti = kept_bti == (token + 1).clamp(max=self._index_topk)[:, None]
        present_bt = present_bti.all(dim=-1)
        partly_bt = ~(present_bt | (kept_bti == 0).all(dim=-1))
        if partly_bt.any():
            b, t = (int(part) for part in partly_bt.nonzero()[0])
            raise ReplayError(
                f"sample {batch.names[b]}: the indexers of token {t} kept {kept_bti[b, t].tolist()} "
                f"positions, expected {min(t + 1, self._index_topk)} of each or none at all: the capture is "
                "incomplete"
            )
        counted_bt = batch.needed_rows_bt & present_bt
        counts.indexer_token_layers += int(counted_bt.sum()) * len(self._modules)
        ordered = torch.where(rows < 0, _NO_POSITION, rows).sort(dim=-1).values
        filled = torch.where(ordered == _NO_POSITION, ordered[..., :1], ordered)
        filled = torch.where(present_bt[..., None, None], filled, -1)
        return _Positions(positions_btik=filled, ordered_btik=ordered, counted_bt=counted_bt)

    def _check(self, rows: torch.Tensor, names: Sequence[str]) -> None:
        num_indexers, width = rows.shape[2:]
        if num_indexers != len(self._modules) or width != self._index_topk:
            raise ReplayError(
                f"recorded positions are of {num_indexers} indexers with {width} places each, the model has "
                f"{len(self._modules)} with {self._index_topk}"
            )
        token = torch.arange(rows.shape[1], device=rows.device, dtype=rows.dtype)[:, None, None]
        wrong = (rows < -1) | (rows > token)
        if wrong.any():
            b, t, i, k = (int(part) for part in wrong.nonzero()[0])
            raise ReplayError(
                f"sample {names[b]}: indexer {i}: token {t} kept position {int(rows[b, t, i, k])}, expected "
                f"-1 to {t}; positions are counted from the start of the request"
            )
        ordered = rows.sort(dim=-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if twice.any():
            raise ReplayError(
                f"sample {names[int(twice.nonzero()[0, 0])]}: a recorded row names a position twice; the "
                "rows were not filled by an indexer"
            )


def _differs(ordered_btk: torch.Tensor, live_btk: torch.Tensor) -> torch.Tensor:
    """Whether recorded and live positions of a token differ; `[b, t]` bool.

    What a live row names beyond its own token is filler: fewer keys exist than may be kept.
    """
    token = torch.arange(live_btk.shape[1], device=live_btk.device)[:, None]
    live = torch.where(live_btk > token, _NO_POSITION, live_btk).sort(dim=-1).values
    width = min(live.shape[-1], ordered_btk.shape[-1])
    same = (live[..., :width] == ordered_btk[..., :width]).all(dim=-1)
    for rest in (live[..., width:], ordered_btk[..., width:]):
        same &= (rest == _NO_POSITION).all(dim=-1)
    return ~same
