"""The contract of a policy loss, and the arithmetic that several losses share.

Shape suffixes: b samples, t tokens.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

MAX_LOG_RATIO = 20.0
"""Log ratios are held within plus and minus this, so that no ratio overflows: 0 * inf would be NaN for a
whole minibatch. An engine gives -9999 for a log-probability that is not finite."""


@dataclass(frozen=True)
class TokenLosses:
    """Loss, ratio and clipping of each token: float32 `[b, t]`, of any value where the loss mask is 0."""

    loss_bt: torch.Tensor
    """Carries the gradient."""
    ratio_bt: torch.Tensor
    """Importance ratio, detached."""
    clipped_bt: torch.Tensor
    """1 where clipping changed the loss, or the weight for CISPO."""


class PolicyLoss(Protocol):
    """A loss as a function of log-probabilities; gradients flow through `logprobs_bt` alone."""

    def __call__(
        self,
        config: Any,
        logprobs_bt: torch.Tensor,
        old_logprobs_bt: torch.Tensor,
        advantages_bt: torch.Tensor,
        loss_mask_bt: torch.Tensor,
    ) -> TokenLosses:
        """Token losses under `config`, the loss's own section; all tensors are float32 `[b, t]`."""
        ...


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio), the log ratio held within `MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    ratio_bt: torch.Tensor, advantages_bt: torch.Tensor, low: float, high: float, dual_clip: float | None
) -> TokenLosses:
    """PPO (Schulman et al. 2017), with the dual clip of Ye et al. 2020 where it is set."""
    plain = -advantages_bt * ratio_bt
    clipped = -advantages_bt * ratio_bt.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, clipped)
    is_clipped = clipped > plain
    if dual_clip is not None:
        bound = -advantages_bt * dual_clip
        bounded = (advantages_bt < 0) & (loss > bound)
        loss, is_clipped = torch.where(bounded, bound, loss), is_clipped | bounded
    return TokenLosses(loss, ratio_bt.detach(), is_clipped.float())
