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


class RouterWeights(ABC):
    """How a family of routers weights the experts that it chose; repeats the router's own operations in
    their order."""

    class_names: frozenset[str]

    @abstractmethod
    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        """`[n, k]` in the router's own output dtype."""


class SoftmaxThenChoose(RouterWeights):
    """Softmax over all experts, and the chosen shares normalised where the router has `norm_topk_prob`
    set."""

    class_names = frozenset(
        {
            "Qwen2MoeTopKRouter",
            "Qwen3MoeTopKRouter",
            "Qwen3NextTopKRouter",
            "OlmoeTopKRouter",
            "FlexOlmoTopKRouter",
        }
    )

    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        chosen = logits_ne.softmax(dim=-1, dtype=torch.float32).gather(1, experts_nk)
        if router.norm_topk_prob:
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        return chosen.to(logits_ne.dtype)


class SoftmaxThenNormalise(RouterWeights):
    """Softmax over all experts and the chosen shares normalised, in float32."""

    class_names = frozenset({"MixtralTopKRouter", "MiniMaxTopKRouter"})

    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        chosen = logits_ne.float().softmax(dim=-1).gather(1, experts_nk)
        return chosen / chosen.sum(dim=-1, keepdim=True)


class ChooseThenSoftmax(RouterWeights):
    """Softmax over the chosen logits alone."""

    class_names = frozenset({"GptOssTopKRouter"})

    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        return logits_ne.gather(1, experts_nk).softmax(dim=1)


class SigmoidThenScale(RouterWeights):
    """Sigmoid of each logit, normalised where `norm_topk_prob` is set, times a constant; the bias only
    chooses."""

    class_names = frozenset({"DeepseekV3TopkRouter", "Glm4MoeTopkRouter"})

    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        chosen = logits_ne.sigmoid().gather(1, experts_nk)
        if router.norm_topk_prob:
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen * router.routed_scaling_factor


FAMILIES: tuple[RouterWeights, ...] = (
    SoftmaxThenChoose(),
    SoftmaxThenNormalise(),
    ChooseThenSoftmax(),
    SigmoidThenScale(),
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
                "weighting to radix_rl.train.routers, or set train.replay_routed_experts=false"
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


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The `num_hidden_layers` decoder layers of a causal LM, in order."""
    config = model.config.get_text_config(decoder=True)
    count = int(config.num_hidden_layers)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and name.endswith("layers") and len(module) >= count:
            return list(module)[:count]
    raise ConfigurationError(f"{type(model).__name__}: found no list of {count} decoder layers")
