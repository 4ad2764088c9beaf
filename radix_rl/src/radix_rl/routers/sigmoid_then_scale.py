"""Sigmoid of each logit, times a constant.

Normalised before that where `norm_topk_prob` is set; a bias takes part in the choice only.
"""

from typing import Any, ClassVar

import torch

from radix_rl.routers.known_classes import KnownClasses


class SigmoidThenScale(KnownClasses):
    name: ClassVar[str] = "sigmoid_then_scale"
    class_names: ClassVar[frozenset[str]] = frozenset(
        {
            "DeepseekV32TopkRouter",
            "DeepseekV3TopkRouter",
            "Dots1TopkRouter",
            "ExaoneMoeTopkRouter",
            "Glm4MoeLiteTopkRouter",
            "Glm4MoeTopkRouter",
            "Glm4vMoeTextTopkRouter",
            "GlmMoeDsaTopkRouter",
            "KimiLinearTopkRouter",
            "MiMoV2FlashTopkRouter",
            "NemotronHTopkRouter",
            "SolarOpenTopkRouter",
        }
    )

    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        chosen = logits_ne.sigmoid().gather(1, experts_nk)
        if router.norm_topk_prob:
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen * router.routed_scaling_factor
