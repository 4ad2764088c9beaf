"""Policy losses: one value for each token, before any reduction. Shape suffixes: b samples, t tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from radix_rl.config.algorithm import (
    CispoLossConfig,
    DapoLossConfig,
    GspoLossConfig,
    LossConfig,
    PpoClipLossConfig,
)

MAX_LOG_RATIO = 20.0
"""Log ratios are held within plus and minus this, so that no ratio overflows: 0 * inf would be NaN for a
whole minibatch. An engine gives -9999 for a log-probability that is not finite."""


@dataclass(frozen=True)
class TokenLosses:
    """All float32 `[b, t]`, of any value where the loss mask is 0."""

    loss_bt: torch.Tensor
    """Carries the gradient."""
    ratio_bt: torch.Tensor
    """Importance ratio, detached."""
    clipped_bt: torch.Tensor
    """1 where clipping changed the loss, or the weight for CISPO."""


def policy_loss(
    config: LossConfig,
    logprobs_bt: torch.Tensor,
    old_logprobs_bt: torch.Tensor,
    advantages_bt: torch.Tensor,
    loss_mask_bt: torch.Tensor,
) -> TokenLosses:
    """The loss that `config` names. Gradients flow through `logprobs_bt` alone."""
    return _LOSSES[type(config)](config, logprobs_bt, old_logprobs_bt, advantages_bt, loss_mask_bt)


def _clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual_clip: float | None
) -> TokenLosses:
    """PPO (Schulman et al. 2017), with the dual clip of Ye et al. 2020 where it is set."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, clipped)
    is_clipped = clipped > plain
    if dual_clip is not None:
        bound = -advantages * dual_clip
        bounded = (advantages < 0) & (loss > bound)
        loss, is_clipped = torch.where(bounded, bound, loss), is_clipped | bounded
    return TokenLosses(loss, ratio.detach(), is_clipped.float())


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _ppo_clip(
    config: PpoClipLossConfig | DapoLossConfig,
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> TokenLosses:
    ratio = _ratio((logprobs - old) * mask)
    return _clipped_surrogate(ratio, advantages, config.clip_low, config.clip_high, config.dual_clip)


def _gspo(
    config: GspoLossConfig,
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> TokenLosses:
    """GSPO (Zheng et al. 2025), its token form: every token has the sequence's ratio, and its own
    gradient."""
    log_ratio = (logprobs - old) * mask
    mean = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = _ratio(mean.detach() + (logprobs - logprobs.detach()) * mask)
    return _clipped_surrogate(ratio, advantages, config.clip_low, config.clip_high, None)


def _cispo(
    config: CispoLossConfig,
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> TokenLosses:
    """CISPO (MiniMax-M1, 2025): REINFORCE with the clipped ratio as a constant weight."""
    ratio = _ratio((logprobs.detach() - old) * mask)
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLosses(-weight * advantages * logprobs, ratio, (weight != ratio).float())


_LOSSES: dict[type, Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], TokenLosses]] = {
    PpoClipLossConfig: _ppo_clip,
    DapoLossConfig: _ppo_clip,
    GspoLossConfig: _gspo,
    CispoLossConfig: _cispo,
}


def kl_to_reference(logprobs_bt: torch.Tensor, reference_logprobs_bt: torch.Tensor) -> torch.Tensor:
    """k3 of Schulman's note on KL estimators: exp(d) - 1 - d with d = reference - policy; `[b, t]`, never
    negative."""
    difference = reference_logprobs_bt - logprobs_bt
    return difference.exp() - 1 - difference
