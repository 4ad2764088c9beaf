"""GSPO (Zheng et al. 2025), in its token form."""

import torch

from radix_rl.config.algorithm import GspoLossConfig
from radix_rl.train.objective.losses.base import TokenLosses, bounded_ratio, clipped_surrogate


def token_losses(
    config: GspoLossConfig,
    logprobs_bt: torch.Tensor,
    old_logprobs_bt: torch.Tensor,
    advantages_bt: torch.Tensor,
    loss_mask_bt: torch.Tensor,
) -> TokenLosses:
    """The clipped surrogate in which every token has the sequence's ratio and its own gradient.

    The sequence's ratio is the geometric mean of its tokens' ratios.
    """
    log_ratio = (logprobs_bt - old_logprobs_bt) * loss_mask_bt
    mean = log_ratio.sum(dim=1, keepdim=True) / loss_mask_bt.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = bounded_ratio(mean.detach() + (logprobs_bt - logprobs_bt.detach()) * loss_mask_bt)
    return clipped_surrogate(ratio, advantages_bt, config.clip_low, config.clip_high, None)
