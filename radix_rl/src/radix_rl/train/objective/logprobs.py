"""Log-probabilities of tokens under the distribution that the engine sampled them from.

The engine's temperature and truncation are repeated on the trainer's logits.
"""

from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from radix_rl.config.rollout import SamplingConfig
from radix_rl.errors import ReplayError
from radix_rl.train.batch import TrainBatch

CHUNK_ROWS = 4096
"""Rows of logits that are held in float32 at once."""


def response_logprobs(
    model: torch.nn.Module, batch: TrainBatch, sampling: SamplingConfig, *, replay_mask: bool = True
) -> torch.Tensor:
    """One forward pass: `[b, t]` float32, log-probability of token t given those before it.

    0 where loss_mask is 0.

    Where sampling truncates, the vocabulary that counts is the batch's sampling mask, or, without one or
    without `replay_mask`, what the transforms leave of this model's own distribution.

    Logits are computed from the first position that predicts a response token on. No attention mask is
    passed: with padding on the right, causal attention keeps real tokens from seeing it.
    """
    counted_bt = batch.loss_mask_bt > 0
    logprobs_bt = torch.zeros_like(batch.rollout_logprobs_bt)
    columns = counted_bt.any(dim=0).nonzero()
    first = int(columns[0]) - 1 if len(columns) else batch.input_ids_bt.shape[1] - 1
    keep = torch.arange(first, batch.input_ids_bt.shape[1], device=batch.input_ids_bt.device)
    logits = model(input_ids=batch.input_ids_bt, use_cache=False, logits_to_keep=keep).logits
    predicts = counted_bt[:, first + 1 :]
    selected = logits[:, :-1][predicts]
    targets = batch.input_ids_bt[:, first + 1 :][predicts]
    masks = _counted_masks(batch, counted_bt, logits.shape[-1]) if replay_mask else None
    parts = [
        token_logprobs(
            selected[start : start + CHUNK_ROWS],
            targets[start : start + CHUNK_ROWS],
            sampling,
            None if masks is None else masks.rows(start, start + CHUNK_ROWS),
        )
        for start in range(0, len(targets), CHUNK_ROWS)
    ]
    # Sums to zero: every parameter of the head gets a gradient also where no token counts.
    total = torch.cat(parts) if parts else selected.sum(dim=-1)
    return logprobs_bt.masked_scatter(counted_bt, total)


class KeptIds(NamedTuple):
    """The vocabulary that each of n tokens was sampled from: pairs of token and id."""

    owner: torch.Tensor
    """`[pairs]` int64, ascending, from 0 to n - 1."""
    ids: torch.Tensor
    """`[pairs]` int64."""

    def rows(self, start: int, end: int) -> "KeptIds":
        """Those of tokens [start, end), counted from `start`."""
        first, last = torch.searchsorted(self.owner, torch.tensor([start, end], device=self.owner.device))
        return KeptIds(self.owner[first:last] - start, self.ids[first:last])


def _counted_masks(batch: TrainBatch, counted_bt: torch.Tensor, vocabulary: int) -> KeptIds | None:
    """Of the tokens that count, in their order. Raises ReplayError for ids outside the model's vocabulary."""
    if batch.mask_lengths_bt is None or batch.mask_ids is None:
        return None
    if ((batch.mask_ids < 0) | (batch.mask_ids >= vocabulary)).any():
        raise ReplayError(
            f"a sampling mask names id {int(batch.mask_ids.max())}, the model's vocabulary has {vocabulary}; "
            "engine and trainer run different models"
        )
    counted = counted_bt.flatten()
    position = torch.arange(counted.numel(), device=counted.device)
    owner = position.repeat_interleave(batch.mask_lengths_bt.flatten())
    counts = counted[owner]
    number = counted.cumsum(dim=0) - 1
    return KeptIds(number[owner[counts]], batch.mask_ids[counts])


def token_logprobs(
    logits_nv: torch.Tensor, ids_n: torch.Tensor, sampling: SamplingConfig, kept: KeptIds | None = None
) -> torch.Tensor:
    """`[n]` float32. The float32 copy of the logits is made again in the backward pass instead of kept."""
    if torch.is_grad_enabled() and logits_nv.requires_grad:
        return checkpoint(_token_logprobs, logits_nv, ids_n, sampling, kept, use_reentrant=False)
    return _token_logprobs(logits_nv, ids_n, sampling, kept)


def _token_logprobs(
    logits_nv: torch.Tensor, ids_n: torch.Tensor, sampling: SamplingConfig, kept: KeptIds | None
) -> torch.Tensor:
    scores = logits_nv.float()
    if sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    if kept is not None:
        kept_nv = torch.zeros_like(scores, dtype=torch.bool)
        kept_nv[kept.owner, kept.ids] = True
        scores = scores.masked_fill(~kept_nv, float("-inf"))
    elif sampling.truncates:
        scores = scores.masked_fill(~_kept(scores.detach(), ids_n, sampling), float("-inf"))
    return scores.gather(1, ids_n[:, None])[:, 0] - scores.logsumexp(dim=-1)


def _kept(scores_nv: torch.Tensor, ids_n: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    """`[n, v]` bool: what top-k, top-p and min-p, together on one distribution, leave.

    The sampled token always stays: the engine sampled it, and rounding on its edge must not make it
    impossible here.
    """
    ordered, ids = scores_nv.softmax(dim=-1).sort(dim=-1, descending=True)
    keep = ordered >= ordered[:, :1] * sampling.min_p
    if sampling.top_p < 1:
        keep &= ordered.cumsum(dim=-1) - ordered <= sampling.top_p
    if sampling.top_k > 0:
        keep[:, sampling.top_k :] = False
    kept = torch.zeros_like(keep).scatter(1, ids, keep)
    return kept.scatter(1, ids_n[:, None], True)
