"""PPO's clipped surrogate on token ratios; DAPO differs by its bounds alone."""

import torch

from radix_rl.config.algorithm import DapoLossConfig, PpoClipLossConfig
from radix_rl.train.objective.losses.base import TokenLosses, bounded_ratio, clipped_surrogate


def token_losses(
    config: PpoClipLossConfig | DapoLossConfig,
    logprobs_bt: torch.Tensor,
    old_logprobs_bt: torch.Tensor,
    advantages_bt: torch.Tensor,
    loss_mask_bt: torch.Tensor,
) -> TokenLosses:
    """The larger of plain and clipped loss, for every token."""
    ratio = bounded_ratio((logprobs_bt - old_logprobs_bt) * loss_mask_bt)
    return clipped_surrogate(ratio, advantages_bt, config.clip_low, config.clip_high, config.dual_clip)
