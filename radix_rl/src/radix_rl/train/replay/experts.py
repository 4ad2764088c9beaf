"""Routing replay: the forward pass of one microbatch uses the experts that the engine recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from radix_rl.errors import ReplayError
from radix_rl.routers.find import find_replayed_routers
from radix_rl.train.batch import TrainBatch
from radix_rl.train.replay.counts import ReplayCounts
from radix_rl.train.replay.hooked import Binding, HookedReplay

RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits `[tokens, experts]`, weights `[tokens, k]`, experts `[tokens, k]`."""


@dataclass(kw_only=True)
class _Experts(Binding):
    experts: dict[int, torch.Tensor]
    """By layer: `[tokens, k]` int64; rows that route live are -1."""
    counted: torch.Tensor
    """`[tokens]` bool: replayed rows of real tokens."""
    has_live_rows: bool
    zeros: "_ZeroRows | None"
    """Rows that may be an unfilled buffer; None: there are none."""


class RouterReplay(HookedReplay[_Experts]):
    """Replays routed experts."""

    kind: ClassVar[str] = "router"

    def __init__(self, model: PreTrainedModel) -> None:
        self._routers = find_replayed_routers(model)
        modules = {layer: found.module for layer, found in self._routers.items()}
        super().__init__(modules)
        config = model.config.get_text_config(decoder=True)
        self._num_layers = int(config.num_hidden_layers)

    def _disagreeing(self, number: int, output: RouterOutput, binding: _Experts) -> torch.Tensor:
        recorded, live = self._matching(number, output, binding)
        if binding.zeros is not None:
            binding.zeros.add_layer(live)
        differs = (recorded.sort(dim=-1).values != live.sort(dim=-1).values).any(dim=-1)
        return (differs & binding.counted).sum()

    def _replayed(
        self, number: int, module: torch.nn.Module, output: RouterOutput, binding: _Experts
    ) -> RouterOutput:
        logits, weights, _ = output
        recorded, live = self._matching(number, output, binding)
        if binding.has_live_rows:
            # Kept for the recomputation of a checkpointed layer, whose router may round to other experts.
            binding.experts[number] = torch.where(recorded >= 0, recorded, live)
        chosen = binding.experts[number]
        kind = self._routers[number].kind
        return logits, kind.weights(module, logits, chosen).to(weights.dtype), chosen

    def _matching(
        self, layer: int, output: RouterOutput, binding: _Experts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Recorded and live experts, of one shape."""
        recorded, live = binding.experts[layer], output[2]
        if recorded.shape != live.shape:
            raise ReplayError(
                f"layer {layer}: expected {tuple(live.shape)} recorded experts (tokens, experts a token), "
                f"got {tuple(recorded.shape)}"
            )
        return recorded, live

    def _add_disagreeing(self, counts: ReplayCounts, number: int) -> None:
        counts.disagreeing += number

    def _bind(self, batch: TrainBatch, counts: ReplayCounts) -> _Experts:
        rows_btlk = batch.routed_experts_btlk
        if rows_btlk is None:
            raise ReplayError(
                "replay is on, but the samples carry no routed experts; the engine must return them "
                "(--enable-return-routed-experts)"
            )
        self._check_layers(rows_btlk, batch.names)
        routed = list(self._routers)
        present_btl = (rows_btlk[:, :, routed] >= 0).all(dim=-1)
        absent_btl = (rows_btlk[:, :, routed] == -1).all(dim=-1)
        partly_bt = ~(present_btl.all(-1) | absent_btl.all(-1))
        if partly_bt.any():
            b, t = (int(part) for part in partly_bt.nonzero()[0])
            raise ReplayError(
                f"sample {batch.names[b]}: the routed experts of token {t} are partly -1: experts of some "
                "layers or places are missing, which means that the capture is incomplete"
            )
        needed_bt = batch.needed_rows_bt
        present_bt = present_btl[:, :, 0]
        live = needed_bt & ~present_bt
        num_needed, num_live = int(needed_bt.sum()), int(live.sum())
        counted = (needed_bt & present_bt).flatten()
        counts.rows += num_needed
        counts.unrecorded_rows += num_live
        counts.token_layers += int(counted.sum()) * len(routed)
        unused = (~needed_bt).flatten()
        experts = {
            layer: _spread(rows_btlk[:, :, layer].flatten(0, 1).long(), unused, int(router.num_experts))
            for layer, (_, router) in self._routers.items()
        }
        return _Experts(
            experts=experts,
            counted=counted,
            has_live_rows=num_live > 0,
            zeros=_zero_rows(rows_btlk[:, :, routed], needed_bt, batch.names),
        )

    def _check_forward(self, binding: _Experts) -> None:
        if binding.zeros is not None:
            binding.zeros.check(len(self._routers))

    def _check_layers(self, rows_btlk: torch.Tensor, names: Sequence[str]) -> None:
        num_layers, top_k = rows_btlk.shape[2:]
        if num_layers != self._num_layers:
            raise ReplayError(
                f"routed experts have {num_layers} layers, but the model has {self._num_layers}; layers are "
                "counted over the whole model, dense ones included"
            )
        for layer in range(num_layers):
            rows = rows_btlk[:, :, layer]
            if layer not in self._routers:
                if (named := rows >= 0).any():
                    raise ReplayError(
                        f"sample {_first(named, names)}: routed experts name experts in layer {layer}, which "
                        "has no router"
                    )
                continue
            router = self._routers[layer].module
            if top_k != router.top_k:
                raise ReplayError(
                    f"layer {layer} routes to {router.top_k} experts a token, the recorded rows have {top_k}"
                )
            outside = (rows >= int(router.num_experts)) | (rows < -1)
            if outside.any():
                raise ReplayError(
                    f"sample {_first(outside, names)}: layer {layer} has experts 0 to "
                    f"{int(router.num_experts) - 1}, a recorded row names expert {int(rows[outside][0])}"
                )
            ordered = rows.sort(dim=-1).values
            twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
            if twice.any():
                raise ReplayError(
                    f"sample {_first(twice, names)}: layer {layer}: a recorded row names an expert twice; "
                    "the rows were not filled by a router"
                )


_FEW_TIES = 4


@dataclass
class _ZeroRows:
    """Rows of a top-1 router that name expert 0 in every layer: chosen so, or a buffer that nobody filled.

    A router with more places would name expert 0 twice in such a row, which is refused at once. Here the
    model's own choices tell: it seldom disagrees with a record.
    """

    zero_bt: torch.Tensor
    """bool."""
    disagreeing_bt: torch.Tensor
    """int64, in how many layers the model itself chose another expert; of any value elsewhere."""
    names: Sequence[str]

    def add_layer(self, live: torch.Tensor) -> None:
        """`live`: experts `[tokens, 1]` that the model chose in one layer."""
        self.disagreeing_bt += (live[:, 0] != 0).view(self.zero_bt.shape)

    def check(self, num_layers: int) -> None:
        """Refuse a sample of whose choices in such rows the model would have made most otherwise.

        A few may be ties between experts. Raises ReplayError.
        """
        choices_b = self.zero_bt.sum(dim=1) * num_layers
        disagreeing_b = (self.disagreeing_bt * self.zero_bt).sum(dim=1)
        unfilled_b = (2 * disagreeing_b > choices_b) & (disagreeing_b >= _FEW_TIES)
        if unfilled_b.any():
            b = int(unfilled_b.nonzero()[0, 0])
            raise ReplayError(
                f"sample {self.names[b]}: {int(self.zero_bt[b].sum())} rows of routed experts are 0 "
                f"throughout, but the model makes {int(disagreeing_b[b])} of their {int(choices_b[b])} "
                "choices otherwise: the capture left them unfilled"
            )


def _zero_rows(rows_btlk: torch.Tensor, needed_bt: torch.Tensor, names: Sequence[str]) -> _ZeroRows | None:
    if rows_btlk.shape[-1] > 1:
        return None
    zero_bt = (rows_btlk == 0).all(dim=-1).all(dim=-1) & needed_bt
    if not zero_bt.any():
        return None
    return _ZeroRows(zero_bt, torch.zeros_like(zero_bt, dtype=torch.int64), names)


def _first(wrong: torch.Tensor, names: Sequence[str]) -> str:
    """The sample of the first true element of `[b, ...]`."""
    return names[int(wrong.nonzero()[0, 0])]


def _spread(experts_nk: torch.Tensor, unused_n: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Send rows whose result nothing uses round the experts, so that none gets them all.

    They are padding and last tokens.
    """
    top_k = experts_nk.shape[1]
    order = unused_n.cumsum(dim=0) - 1
    places = torch.arange(top_k, device=experts_nk.device)
    round_robin = (order[:, None] * top_k + places) % num_experts
    return torch.where(unused_n[:, None], round_robin, experts_nk)
