"""Softmax over the chosen logits alone."""

from typing import Any, ClassVar

import torch

from radix_rl.routers.known_classes import KnownClasses


class ChooseThenSoftmax(KnownClasses):
    name: ClassVar[str] = "choose_then_softmax"
    class_names: ClassVar[frozenset[str]] = frozenset({"GptOssTopKRouter"})

    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        return logits_ne.gather(1, experts_nk).softmax(dim=1)
