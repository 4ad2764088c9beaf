"""Indexer replay: sparse attention of one microbatch keeps the positions that the engine recorded.

Like routing replay (`experts.py`), by hooks that sit on the live modules while a microbatch is bound.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from radix_rl.errors import ConfigurationError, ReplayError, TrainingError
from radix_rl.model_layers import decoder_layers, find_indexers
from radix_rl.train.batch import TrainBatch
from radix_rl.train.replay.counts import ReplayCounts

_NO_POSITION = 2**31 - 1
"""Takes the place of -1 where sets are compared: it sorts last."""


@dataclass
class _Binding:
    """One microbatch's positions, and how often each indexer has asked for them."""

    positions_btik: torch.Tensor
    """int32, each row filled up with its first position where fewer were kept; -1 throughout without a
    record."""
    ordered_btik: torch.Tensor
    """int32, ascending, `_NO_POSITION` where fewer were kept."""
    counted_bt: torch.Tensor
    """bool: replayed rows of real tokens."""
    calls: dict[int, int] = field(default_factory=dict)
    disagreeing: list[torch.Tensor] = field(default_factory=list)
    recomputing: bool = False


class IndexerReplay:
    """Replays the positions that sparse attention kept, in one model. One thread; one microbatch is bound at
    a time."""

    def __init__(self, model: PreTrainedModel, *, max_live_share: float) -> None:
        """`max_live_share`: the part of a microbatch's token rows that may lack recorded positions."""
        self._indexers = find_indexers(decoder_layers(model))
        if not self._indexers:
            raise ConfigurationError(
                f"train.replay_indexer_topk is on, but {type(model).__name__} has no indexer; set it to false"
            )
        self._index_topk = int(model.config.get_text_config(decoder=True).index_topk)
        self._max_live_share = max_live_share
        self._bound: _Binding | None = None

    @contextmanager
    def microbatch(self, batch: TrainBatch, counts: ReplayCounts) -> Iterator["IndexerReplay"]:
        """As RouterReplay.microbatch."""
        if self._bound is not None:
            raise TrainingError("a microbatch is bound already; its forward and backward pass must end first")
        binding = self._bind(batch, counts)
        self._bound = binding
        handles = [
            indexer.register_forward_hook(self._hook(number)) for number, indexer in enumerate(self._indexers)
        ]
        try:
            yield self
            counts.indexer_disagreeing += int(sum(int(count) for count in binding.disagreeing))
        finally:
            for handle in handles:
                handle.remove()
            self._bound = None

    def forward_finished(self) -> None:
        """Raises ReplayError unless every indexer was called once. From here on calls are recomputation."""
        assert self._bound is not None
        calls = [self._bound.calls.get(number, 0) for number in range(len(self._indexers))]
        if any(number != 1 for number in calls):
            raise ReplayError(
                f"replay expected one call of each indexer in a forward pass, got {calls} calls; the model "
                "shares, skips or repeats indexers, which replay does not support"
            )
        self._bound.recomputing = True

    def _hook(self, number: int) -> Callable[..., torch.Tensor]:
        def hook(_indexer: torch.nn.Module, _args: object, live_btk: torch.Tensor) -> torch.Tensor:
            binding = self._bound
            assert binding is not None
            recorded = binding.positions_btik[:, :, number]
            if not binding.recomputing:
                binding.calls[number] = binding.calls.get(number, 0) + 1
                differs = _differs(binding.ordered_btik[:, :, number], live_btk)
                binding.disagreeing.append((differs & binding.counted_bt).sum())
            # A short batch has fewer keys than the indexer may keep: naming one twice changes nothing.
            missing = recorded.shape[-1] - live_btk.shape[-1]
            live = torch.cat([live_btk, live_btk[..., :1].expand(-1, -1, missing)], dim=-1)
            return torch.where(recorded >= 0, recorded.to(live.dtype), live)

        return hook

    def _bind(self, batch: TrainBatch, counts: ReplayCounts) -> _Binding:
        rows = batch.indexer_topk_btik
        if rows is None:
            raise ReplayError(
                "indexer replay is on, but the samples carry no indexer_topk; the engine must return it "
                "(--enable-return-indexer-topk)"
            )
        self._check(rows)
        present_bti = (rows >= 0).any(dim=-1)
        present_bt = present_bti.all(dim=-1)
        if not (present_bt | ~present_bti.any(dim=-1)).all():
            raise ReplayError(
                "a token has recorded positions in some indexers and none in others, which means that the "
                "capture is incomplete"
            )
        token = torch.arange(rows.shape[1], device=rows.device)
        needed_bt = token < (batch.lengths_b - 1)[:, None]
        num_needed, num_live = int(needed_bt.sum()), int((needed_bt & ~present_bt).sum())
        if num_live > self._max_live_share * num_needed:
            raise ReplayError(
                f"{num_live} of {num_needed} token rows have no recorded positions, more than the share "
                f"{self._max_live_share} that train.max_live_routed_share allows"
            )
        counted_bt = needed_bt & present_bt
        counts.indexer_token_layers += int(counted_bt.sum()) * len(self._indexers)
        ordered = torch.where(rows < 0, _NO_POSITION, rows).sort(dim=-1).values
        filled = torch.where(ordered == _NO_POSITION, ordered[..., :1], ordered)
        filled = torch.where(present_bt[..., None, None], filled, -1)
        return _Binding(positions_btik=filled, ordered_btik=ordered, counted_bt=counted_bt)

    def _check(self, rows: torch.Tensor) -> None:
        num_indexers, width = rows.shape[2:]
        if num_indexers != len(self._indexers) or width != self._index_topk:
            raise ReplayError(
                f"recorded positions are of {num_indexers} indexers with {width} places each, the model has "
                f"{len(self._indexers)} with {self._index_topk}"
            )
        token = torch.arange(rows.shape[1], device=rows.device, dtype=rows.dtype)[:, None, None]
        wrong = (rows < -1) | (rows > token)
        if wrong.any():
            b, t, i, k = (int(part) for part in wrong.nonzero()[0])
            raise ReplayError(
                f"indexer {i}: token {t} kept position {int(rows[b, t, i, k])}, expected -1 to {t}; "
                "positions are counted from the start of the request"
            )
        ordered = rows.sort(dim=-1).values
        if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
            raise ReplayError("a recorded row names a position twice; the rows were not filled by an indexer")


def _differs(ordered_btk: torch.Tensor, live_btk: torch.Tensor) -> torch.Tensor:
    """`[b, t]` bool. What a live row names beyond its own token is filler: fewer keys exist than may be
    kept."""
    token = torch.arange(live_btk.shape[1], device=live_btk.device)[:, None]
    live = torch.where(live_btk > token, _NO_POSITION, live_btk).sort(dim=-1).values
    width = min(live.shape[-1], ordered_btk.shape[-1])
    same = (live[..., :width] == ordered_btk[..., :width]).all(dim=-1)
    for rest in (live[..., width:], ordered_btk[..., width:]):
        same &= (rest == _NO_POSITION).all(dim=-1)
    return ~same
