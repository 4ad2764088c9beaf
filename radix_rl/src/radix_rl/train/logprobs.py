"""Log-probabilities of tokens under the distribution that they were sampled from: the engine's transforms,
repeated."""

import torch
from torch.utils.checkpoint import checkpoint

from radix_rl.config.rollout import SamplingConfig
from radix_rl.train.batch import TrainBatch

CHUNK_ROWS = 4096
"""Rows of logits that are held in float32 at once."""


def response_logprobs(model: torch.nn.Module, batch: TrainBatch, sampling: SamplingConfig) -> torch.Tensor:
    """One forward pass: `[b, t]` float32, log-probability of token t given those before it; 0 where
    loss_mask is 0.

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
    chunks = zip(selected.split(CHUNK_ROWS), targets.split(CHUNK_ROWS), strict=True)
    parts = [token_logprobs(rows, ids, sampling) for rows, ids in chunks]
    # Sums to zero: every parameter of the head gets a gradient also where no token counts.
    total = torch.cat(parts) if parts else selected.sum(dim=-1)
    return logprobs_bt.masked_scatter(counted_bt, total)


def token_logprobs(logits_nv: torch.Tensor, ids_n: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    """`[n]` float32. The float32 copy of the logits is made again in the backward pass instead of kept."""
    if torch.is_grad_enabled() and logits_nv.requires_grad:
        return checkpoint(_token_logprobs, logits_nv, ids_n, sampling, use_reentrant=False)
    return _token_logprobs(logits_nv, ids_n, sampling)


def _token_logprobs(logits_nv: torch.Tensor, ids_n: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    scores = logits_nv.float()
    if sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
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
