"""Softmax over all experts in float32, times a constant."""

from typing import Any, ClassVar

import torch

from radix_rl.routers.known_classes import KnownClasses


class SoftmaxThenScale(KnownClasses):
    name: ClassVar[str] = "softmax_then_scale"
    class_names: ClassVar[frozenset[str]] = frozenset({"DeepseekV2TopkRouter"})

    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        chosen = logits_ne.softmax(dim=-1, dtype=torch.float32).gather(1, experts_nk)
        return chosen * router.routed_scaling_factor
