"""The KL penalty to the reference model."""

import torch

from radix_rl.train.objective.losses.base import MAX_LOG_RATIO


def kl_to_reference(logprobs_bt: torch.Tensor, reference_logprobs_bt: torch.Tensor) -> torch.Tensor:
    """k3 of Schulman's note on KL estimators; `[b, t]`, never negative.

    exp(d) - 1 - d with d = reference - policy, held within `MAX_LOG_RATIO` as the losses' log ratios are: a
    token far outside of that gets no gradient of the penalty, in place of one that is all of the step's.
    """
    difference = (reference_logprobs_bt - logprobs_bt).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - 1 - difference
