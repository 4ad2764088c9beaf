"""How far rollout and trainer log-probabilities differ, over response tokens."""

from dataclasses import dataclass

import torch


@dataclass
class MismatchSums:
    """Sums over microbatches of d = trainer - rollout."""

    tokens: float = 0.0
    absolute: float = 0.0
    k3: float = 0.0
    """Of exp(d) - 1 - d, an estimate of KL(rollout || trainer) that is never negative."""
    largest: float = 0.0
    """Of |d|."""
    largest_ratio_deviation: float = 0.0
    """Of |exp(d) - 1|: how far a token's importance ratio is from 1."""

    def add(self, trainer_bt: torch.Tensor, rollout_bt: torch.Tensor, mask_bt: torch.Tensor) -> None:
        difference = ((trainer_bt.detach() - rollout_bt).double())[mask_bt > 0]
        if difference.numel() == 0:
            return
        deviation = difference.expm1()
        self.tokens += difference.numel()
        self.absolute += float(difference.abs().sum())
        self.k3 += float((deviation - difference).sum())
        self.largest = max(self.largest, float(difference.abs().max()))
        self.largest_ratio_deviation = max(self.largest_ratio_deviation, float(deviation.abs().max()))
