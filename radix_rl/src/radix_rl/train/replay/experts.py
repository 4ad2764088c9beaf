"""Routing replay: the forward pass of one microbatch uses the experts that the engine recorded.

Hooks sit on the live router modules while a microbatch is bound, and nowhere else: the plain path is the
same model without hooks, and an exception leaves nothing behind.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from radix_rl.errors import ReplayError, TrainingError
from radix_rl.train.batch import TrainBatch
from radix_rl.train.replay.counts import ReplayCounts
from radix_rl.train.replay.router_weights import RouterWeights, find_replay_routers

RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits `[tokens, experts]`, weights `[tokens, k]`, experts `[tokens, k]`."""


@dataclass
class _Binding:
    """One microbatch's experts by layer, and how often each router has asked for them."""

    experts: dict[int, torch.Tensor]
    """`[tokens, k]` int64; rows that route live are -1."""
    counted: torch.Tensor
    """`[tokens]` bool: replayed rows of real tokens."""
    has_live_rows: bool
    calls: dict[int, int] = field(default_factory=dict)
    disagreeing: list[torch.Tensor] = field(default_factory=list)
    recomputing: bool = False


class RouterReplay:
    """Replays routed experts in one model. One thread; one microbatch is bound at a time."""

    def __init__(self, model: PreTrainedModel, *, max_live_share: float) -> None:
        """`max_live_share`: the part of a microbatch's token rows that may lack recorded experts."""
        self._routers = find_replay_routers(model)
        config = model.config.get_text_config(decoder=True)
        self._num_layers = int(config.num_hidden_layers)
        self._max_live_share = max_live_share
        self._bound: _Binding | None = None

    @contextmanager
    def microbatch(self, batch: TrainBatch, counts: ReplayCounts) -> Iterator["RouterReplay"]:
        """Forward and backward pass of `batch` happen inside; call `forward_finished` between them.

        Counts are added when the block ends without an error. Raises ReplayError for rows that do not fit
        the model.
        """
        if self._bound is not None:
            raise TrainingError("a microbatch is bound already; its forward and backward pass must end first")
        binding = self._bind(batch, counts)
        self._bound = binding
        handles = [
            router.register_forward_hook(self._hook(layer, family))
            for layer, (router, family) in self._routers.items()
        ]
        try:
            yield self
            counts.disagreeing += int(sum(int(count) for count in binding.disagreeing))
        finally:
            for handle in handles:
                handle.remove()
            self._bound = None

    def forward_finished(self) -> None:
        """Raises ReplayError unless every router was called once. From here on calls are recomputation."""
        assert self._bound is not None
        wrong = {layer: calls for layer in self._routers if (calls := self._bound.calls.get(layer, 0)) != 1}
        if wrong:
            raise ReplayError(
                f"replay expected one call of each router in a forward pass, got {wrong} (layer: calls); the "
                "model shares, "
                "skips or repeats routers, which replay does not support"
            )
        self._bound.recomputing = True

    def _hook(self, layer: int, family: RouterWeights) -> Callable[..., RouterOutput]:
        def hook(router: torch.nn.Module, _args: object, output: RouterOutput) -> RouterOutput:
            logits, weights, live = output
            binding = self._bound
            assert binding is not None
            recorded = binding.experts[layer]
            if recorded.shape != live.shape:
                raise ReplayError(
                    f"layer {layer}: expected {tuple(live.shape)} recorded experts (tokens, experts a "
                    "token), "
                    f"got {tuple(recorded.shape)}"
                )
            if not binding.recomputing:
                binding.calls[layer] = binding.calls.get(layer, 0) + 1
                differs = (recorded.sort(dim=-1).values != live.sort(dim=-1).values).any(dim=-1)
                binding.disagreeing.append((differs & binding.counted).sum())
            chosen = torch.where(recorded >= 0, recorded, live) if binding.has_live_rows else recorded
            return logits, family.weights(router, logits, chosen).to(weights.dtype), chosen

        return hook

    def _bind(self, batch: TrainBatch, counts: ReplayCounts) -> _Binding:
        rows_btlk = batch.routed_experts_btlk
        if rows_btlk is None:
            raise ReplayError(
                "replay is on, but the samples carry no routed experts; the engine must return them "
                "(--enable-return-routed-experts)"
            )
        self._check_layers(rows_btlk)
        routed = list(self._routers)
        present_btl = (rows_btlk[:, :, routed] >= 0).all(dim=-1)
        absent_btl = (rows_btlk[:, :, routed] == -1).all(dim=-1)
        if not (present_btl | absent_btl).all() or not (present_btl.all(-1) | absent_btl.all(-1)).all():
            raise ReplayError(
                "a row of routed experts is partly -1: experts of some layers or places are missing, which "
                "means that the "
                "capture is incomplete"
            )
        positions = torch.arange(rows_btlk.shape[1], device=rows_btlk.device)
        needed_bt = positions < (batch.lengths_b - 1)[:, None]
        present_bt = present_btl[:, :, 0]
        live = needed_bt & ~present_bt
        num_needed, num_live = int(needed_bt.sum()), int(live.sum())
        if num_live > self._max_live_share * num_needed:
            raise ReplayError(
                f"{num_live} of {num_needed} token rows have no recorded experts, more than the share "
                f"{self._max_live_share} that train.max_live_routed_share allows"
            )
        counted = (needed_bt & present_bt).flatten()
        counts.rows += num_needed
        counts.live_rows += num_live
        counts.token_layers += int(counted.sum()) * len(routed)
        unused = (~needed_bt).flatten()
        experts = {
            layer: _spread(rows_btlk[:, :, layer].flatten(0, 1).long(), unused, int(router.num_experts))
            for layer, (router, _) in self._routers.items()
        }
        return _Binding(experts=experts, counted=counted, has_live_rows=num_live > 0)

    def _check_layers(self, rows_btlk: torch.Tensor) -> None:
        num_layers, top_k = rows_btlk.shape[2:]
        if num_layers != self._num_layers:
            raise ReplayError(
                f"routed experts have {num_layers} layers, but the model has {self._num_layers}; layers are "
                "counted over "
                "the whole model, dense ones included"
            )
        for layer in range(num_layers):
            rows = rows_btlk[:, :, layer]
            if layer not in self._routers:
                if (rows >= 0).any():
                    raise ReplayError(f"routed experts name experts in layer {layer}, which has no router")
                continue
            router = self._routers[layer][0]
            if top_k != router.top_k:
                raise ReplayError(
                    f"layer {layer} routes to {router.top_k} experts a token, the recorded rows have {top_k}"
                )
            if int(rows.max()) >= int(router.num_experts) or int(rows.min()) < -1:
                wrong = int(rows.max()) if int(rows.max()) >= int(router.num_experts) else int(rows.min())
                raise ReplayError(
                    f"layer {layer} has experts 0 to {int(router.num_experts) - 1}, a recorded row names "
                    f"expert {wrong}"
                )
            ordered = rows.sort(dim=-1).values
            if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
                raise ReplayError(
                    f"layer {layer}: a recorded row names an expert twice; the rows were not filled by a "
                    "router"
                )


def _spread(experts_nk: torch.Tensor, unused_n: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Rows whose result nothing uses (padding, last tokens) go round the experts, so that none gets them
    all."""
    top_k = experts_nk.shape[1]
    order = unused_n.cumsum(dim=0) - 1
    places = torch.arange(top_k, device=experts_nk.device)
    round_robin = (order[:, None] * top_k + places) % num_experts
    return torch.where(unused_n[:, None], round_robin, experts_nk)
