"""Softmax over all experts in float32, the chosen shares over their sum or a floor.

A bias takes part in the choice only.
"""

from typing import Any, ClassVar

import torch

from radix_rl.routers.known_classes import KnownClasses


class SoftmaxOverFloor(KnownClasses):
    name: ClassVar[str] = "softmax_over_floor"
    class_names: ClassVar[frozenset[str]] = frozenset({"Ernie4_5_MoeTopKRouter"})

    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        chosen = logits_ne.softmax(dim=-1, dtype=torch.float32).gather(1, experts_nk)
        return chosen / chosen.sum(dim=-1, keepdim=True).clamp(min=router.norm_min)
