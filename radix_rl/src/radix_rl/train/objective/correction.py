"""Rollout correction: weights for tokens whose probabilities differ between engine and trainer."""

import torch

from radix_rl.config.algorithm import CorrectionConfig


def correction_weights(
    config: CorrectionConfig,
    old_logprobs_bt: torch.Tensor,
    rollout_logprobs_bt: torch.Tensor,
    loss_mask_bt: torch.Tensor,
) -> torch.Tensor:
    """`[b, t]` float32, detached: exp(trainer before the step - rollout), of the token or the whole response.

    "truncated" bounds the weights above; "masked" sets those outside the bounds to 0. Where the loss mask is
    0 the value means nothing.
    """
    if config.type == "none":
        return torch.ones_like(rollout_logprobs_bt)
    difference = (old_logprobs_bt.detach() - rollout_logprobs_bt) * loss_mask_bt
    if config.level == "sequence":
        difference = difference.sum(dim=1, keepdim=True).expand_as(difference)
    weights = difference.exp()
    if config.type == "truncated":
        return weights.clamp(max=config.high)
    return torch.where((weights >= config.low) & (weights <= config.high), weights, 0.0)
