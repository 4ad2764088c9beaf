"""`Float32Products`: bfloat16 layers multiplied in float32, for CPUs that have no bfloat16 instructions.

There torch multiplies bfloat16 matrices several times slower than float32 ones. Weights and activations stay
bfloat16; only the products of linear layers and experts are computed from float32 copies of both and rounded
to bfloat16 afterwards, which is what bfloat16 hardware does: it accumulates in float32. Costs memory for one
float32 copy of these weights.
"""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from radix_rl.engines.embedded.experts import (
    by_input,
    sorted_experts_forward,
    stacked_experts,
    uses_grouped_products,
)

EXPERTS_NAME = "radix_float32_products"
_ATTRIBUTE = "_radix_float32_experts"


def cpu_lacks_bfloat16() -> bool:
    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class Float32Products:
    """Used by the worker thread only. `refresh` must follow every change of the model's weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        linears = [m for m in model.modules() if type(m) is torch.nn.Linear]
        # Layers that the model keeps in float32 need no help.
        self._linears = {m: _Float32Linear(m) for m in linears if m.weight.dtype == torch.bfloat16}
        self._experts = stacked_experts(model) if uses_grouped_products(model) else []
        for linear, product in self._linears.items():
            linear.forward = product
        if self._experts:
            ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _experts_forward)
            model.set_experts_implementation(EXPERTS_NAME)
        self.refresh()

    def refresh(self) -> None:
        """Copy the weights anew."""
        for product in self._linears.values():
            product.refresh()
        for experts in self._experts:
            setattr(experts, _ATTRIBUTE, _Float32Experts(experts))

    def release(self) -> None:
        """Give the copies' memory back, until the next refresh."""
        for product in self._linears.values():
            product.release()
        for experts in self._experts:
            setattr(experts, _ATTRIBUTE, None)


class _Float32Linear:
    def __init__(self, linear: torch.nn.Linear) -> None:
        self._linear = linear
        self.release()

    def refresh(self) -> None:
        self._weight = self._linear.weight.detach().float()
        self._bias = None if self._linear.bias is None else self._linear.bias.detach().float()

    def release(self) -> None:
        self._weight = torch.empty(0)
        self._bias = None

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(input.float(), self._weight, self._bias).to(input.dtype)


class _Float32Experts:
    """An experts module as `sorted_experts_forward` sees it, with float32 weights."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        for name, parameter in experts.named_parameters(recurse=False):
            copy = by_input(parameter.detach().float(), is_transposed=experts.is_transposed)
            setattr(self, name, copy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


def _experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    # A model that only shares its configuration with the engine's has no copies and multiplies as it is.
    experts = getattr(self, _ATTRIBUTE, None) or self
    return sorted_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
