"""Forward functions of whole models without transformers' decorators.

They cost a small model's step two percent.

The decorators fill in arguments that the caller omits, from the configuration, and collect further outputs on
request. The engine passes every argument that it needs and requests none.
"""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

from transformers import PreTrainedModel

from radix_rl.engines.embedded.step import active_step

_DECORATORS = frozenset({"transformers.utils.generic", "transformers.utils.output_capturing"})
"""Modules that define those which can be left out."""

_WISHES = (
    *("output_attentions", "output_hidden_states", "output_router_logits"),
    *("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio"),
)
"""What a configuration may say to them; false or None where it says nothing."""


def use_bare_forward(model: PreTrainedModel) -> None:
    """In engine steps, of the model and the models in it, unless their configuration asks for something."""
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or "forward" in vars(module):
            continue
        config = module.config
        if any(getattr(config, name, None) for name in _WISHES) or not config.return_dict:
            continue
        if getattr(config, "is_causal", None) is not None:
            continue
        decorated: Any = type(module).forward
        bare = decorated
        while bare.__globals__["__name__"] in _DECORATORS and hasattr(bare, "__wrapped__"):
            bare = bare.__wrapped__
        if bare is not decorated:
            module.forward = MethodType(_bare_in_steps(decorated, bare), module)


def _bare_in_steps(decorated: Callable[..., Any], bare: Callable[..., Any]) -> Callable[..., Any]:
    # With its signature, from which transformers' `generate` concludes what it may pass.
    @wraps(decorated)
    def forward(module: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return (decorated if active_step() is None else bare)(module, *args, **kwargs)

    return forward
