"""The KL penalty to the reference model."""

import torch


def kl_to_reference(logprobs_bt: torch.Tensor, reference_logprobs_bt: torch.Tensor) -> torch.Tensor:
    """k3 of Schulman's note on KL estimators; `[b, t]`, never negative.

    exp(d) - 1 - d with d = reference - policy.
    """
    difference = reference_logprobs_bt - logprobs_bt
    return difference.exp() - 1 - difference
