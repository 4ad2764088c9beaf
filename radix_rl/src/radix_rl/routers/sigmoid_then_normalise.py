"""Sigmoid of each logit in float32, normalised over the chosen ones.

A bias takes part in the choice only.
"""

from typing import Any, ClassVar

import torch

from radix_rl.routers.known_classes import KnownClasses


class SigmoidThenNormalise(KnownClasses):
    name: ClassVar[str] = "sigmoid_then_normalise"
    class_names: ClassVar[frozenset[str]] = frozenset({"MiniMaxM2TopKRouter"})

    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        chosen = logits_ne.float().sigmoid().gather(1, experts_nk)
        return chosen / chosen.sum(dim=-1, keepdim=True)
