"""Softmax over all experts in float32, of which the best are chosen.

The chosen shares are normalised unless the router's `norm_topk_prob` says no.
"""

from typing import Any, ClassVar

import torch

from radix_rl.routers.known_classes import KnownClasses


class SoftmaxThenChoose(KnownClasses):
    name: ClassVar[str] = "softmax_then_choose"
    class_names: ClassVar[frozenset[str]] = frozenset(
        {
            "FlexOlmoTopKRouter",
            "MellumTopKRouter",
            "MiniMaxTopKRouter",
            "MixtralTopKRouter",
            "OlmoeTopKRouter",
            "Qwen2MoeTopKRouter",
            "Qwen3MoeTopKRouter",
            "Qwen3NextTopKRouter",
            "Qwen3OmniMoeTextTopKRouter",
            "Qwen3OmniMoeThinkerTextTopKRouter",
            "Qwen3VLMoeTextTopKRouter",
            "Qwen3_5MoeTopKRouter",
        }
    )

    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        chosen = logits_ne.softmax(dim=-1, dtype=torch.float32).gather(1, experts_nk)
        if getattr(router, "norm_topk_prob", True):
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        return chosen
