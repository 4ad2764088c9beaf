"""CISPO (MiniMax-M1, 2025)."""

import torch

from radix_rl.config.algorithm import CispoLossConfig
from radix_rl.train.objective.losses.base import TokenLosses, bounded_ratio


def token_losses(
    config: CispoLossConfig,
    logprobs_bt: torch.Tensor,
    old_logprobs_bt: torch.Tensor,
    advantages_bt: torch.Tensor,
    loss_mask_bt: torch.Tensor,
) -> TokenLosses:
    """REINFORCE with the clipped ratio as a constant weight."""
    ratio = bounded_ratio((logprobs_bt.detach() - old_logprobs_bt) * loss_mask_bt)
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLosses(-weight * advantages_bt * logprobs_bt, ratio, (weight != ratio).float())
