"""Forward functions of whole models without transformers' decorators, which cost a small model's step two
percent.

These take arguments that the caller leaves out from the configuration, and collect outputs that it or the
caller asks for. The engine gives what it means to and asks for nothing.
"""

from functools import partial
from typing import Any

from transformers import PreTrainedModel

from radix_rl.engines.embedded.step import active_step

_DECORATORS = frozenset({"transformers.utils.generic", "transformers.utils.output_capturing"})
"""Modules that define those which can be left out."""

_WISHES = (
    *("output_attentions", "output_hidden_states", "output_router_logits", "is_causal"),
    *("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio"),
)
"""What a configuration may say to them; false or None where it says nothing."""


def use_bare_forward(model: PreTrainedModel) -> None:
    """In engine steps, of the model and the models in it, unless their configuration asks for something."""
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or "forward" in vars(module):
            continue
        if any(getattr(module.config, name, None) for name in _WISHES) or not module.config.return_dict:
            continue
        bare: Any = type(module).forward
        while bare.__globals__["__name__"] in _DECORATORS and hasattr(bare, "__wrapped__"):
            bare = bare.__wrapped__
        if bare is not type(module).forward:
            module.forward = partial(_forward, module, bare)


def _forward(module: PreTrainedModel, bare: Any, *args: Any, **kwargs: Any) -> Any:
    if active_step() is None:
        return type(module).forward(module, *args, **kwargs)
    return bare(module, *args, **kwargs)
