"""Policy losses by the `type` of their settings."""

import torch

from radix_rl.config.algorithm import LossConfig
from radix_rl.train.objective.losses import cispo, gspo, ppo_clip
from radix_rl.train.objective.losses.base import PolicyLoss, TokenLosses

LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": ppo_clip.token_losses,
    "dapo": ppo_clip.token_losses,
    "gspo": gspo.token_losses,
    "cispo": cispo.token_losses,
}


def policy_loss(
    config: LossConfig,
    logprobs_bt: torch.Tensor,
    old_logprobs_bt: torch.Tensor,
    advantages_bt: torch.Tensor,
    loss_mask_bt: torch.Tensor,
) -> TokenLosses:
    """Token losses by the loss that `config` names; gradients flow through `logprobs_bt` alone."""
    return LOSSES[config.type](config, logprobs_bt, old_logprobs_bt, advantages_bt, loss_mask_bt)
