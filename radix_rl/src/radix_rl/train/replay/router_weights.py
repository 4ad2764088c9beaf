"""Routers of Hugging Face models that can be told which experts to use, one adapter for each way of
weighting them.

A router here is a module that returns `(logits [n, experts], weights [n, k], experts [n, k])`, the interface
of transformers 5. Replay keeps its logits, takes the recorded experts, and weights them by the live logits,
so that gradients reach the router.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from radix_rl.errors import ConfigurationError
from radix_rl.model_layers import decoder_layers


class RouterWeights(ABC):
    """How a family of routers weights the experts that it chose; repeats the router's own operations in
    their order."""

    class_names: frozenset[str]

    @abstractmethod
    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        """`[n, k]`; replay casts it to the dtype of the router's own answer."""


class SoftmaxThenChoose(RouterWeights):
    """Softmax over all experts in float32; the chosen shares are normalised unless the router's
    `norm_topk_prob` says no."""

    class_names = frozenset(
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


class SoftmaxThenScale(RouterWeights):
    """Softmax over all experts in float32, times a constant."""

    class_names = frozenset({"DeepseekV2TopkRouter"})

    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        chosen = logits_ne.softmax(dim=-1, dtype=torch.float32).gather(1, experts_nk)
        return chosen * router.routed_scaling_factor


class SoftmaxThenNormaliseAbove(RouterWeights):
    """Softmax over all experts in float32, the chosen shares over their sum or a floor; a bias only
    chooses."""

    class_names = frozenset({"Ernie4_5_MoeTopKRouter"})

    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        chosen = logits_ne.softmax(dim=-1, dtype=torch.float32).gather(1, experts_nk)
        return chosen / chosen.sum(dim=-1, keepdim=True).clamp(min=router.norm_min)


class ChooseThenSoftmax(RouterWeights):
    """Softmax over the chosen logits alone."""

    class_names = frozenset({"GptOssTopKRouter"})

    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        return logits_ne.gather(1, experts_nk).softmax(dim=1)


class SigmoidThenScale(RouterWeights):
    """Sigmoid of each logit, normalised where `norm_topk_prob` is set, times a constant; the bias only
    chooses."""

    class_names = frozenset(
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


class SigmoidThenNormalise(RouterWeights):
    """Sigmoid of each logit in float32, normalised; the bias only chooses."""

    class_names = frozenset({"MiniMaxM2TopKRouter"})

    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        chosen = logits_ne.float().sigmoid().gather(1, experts_nk)
        return chosen / chosen.sum(dim=-1, keepdim=True)


FAMILIES: tuple[RouterWeights, ...] = (
    SoftmaxThenChoose(),
    SoftmaxThenScale(),
    SoftmaxThenNormaliseAbove(),
    ChooseThenSoftmax(),
    SigmoidThenScale(),
    SigmoidThenNormalise(),
)

_BY_CLASS: Mapping[str, RouterWeights] = {name: family for family in FAMILIES for name in family.class_names}


def find_replay_routers(model: PreTrainedModel) -> dict[int, tuple[Any, RouterWeights]]:
    """Layer number, counted over the whole model, -> its router. Dense layers are absent; layers beyond
    `num_hidden_layers` (multi-token prediction) are not looked at.

    Raises ConfigurationError for a layer with experts but no router known here, and for a model without any.
    """
    layers = decoder_layers(model)
    found: dict[int, tuple[torch.nn.Module, RouterWeights]] = {}
    for index, layer in enumerate(layers):
        routers = [module for module in layer.modules() if type(module).__name__ in _BY_CLASS]
        has_experts = any(type(module).__name__.endswith("Experts") for module in layer.modules())
        if len(routers) != int(has_experts):
            names = sorted(
                {type(module).__name__ for module in layer.modules() if "Rout" in type(module).__name__}
            )
            raise ConfigurationError(
                f"layer {index}: expected one router that replay knows, got {names}; known: "
                f"{sorted(_BY_CLASS)}. Add its "
                "weighting to radix_rl.train.replay.router_weights, or set train.replay_routed_experts=false"
            )
        if routers:
            found[index] = (routers[0], _BY_CLASS[type(routers[0]).__name__])
    if not found:
        raise ConfigurationError(
            f"train.replay_routed_experts is on, but {type(model).__name__} has no routers; set it to false "
            "for a dense "
            "model"
        )
    return found
