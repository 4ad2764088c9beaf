"""`Float32Products`: bfloat16 layers multiplied in float32, for CPUs that have no bfloat16 instructions.

There torch multiplies bfloat16 matrices several times slower than float32 ones. Weights and activations stay
bfloat16; only the products of linear layers and experts are computed from float32 copies of both and rounded
to bfloat16 afterwards, which is what bfloat16 hardware does: it accumulates in float32. Costs memory for one
float32 copy of these weights.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from radix_rl.engines.embedded.shortcuts.experts import by_input, grouped_experts, sorted_experts_forward


def cpu_lacks_bfloat16() -> bool:
    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class Float32Products:
    """Float32 copies of a model's linear layers and experts, and their use.

    Used by the worker thread only. `refresh` must follow every change of the model's weights. The modules'
    `forward` is replaced until whoever recorded that undoes it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        linears: list[Any] = [m for m in model.modules() if type(m) is torch.nn.Linear]
        self._products: list[_Float32Linear | _Float32Experts] = [
            # Layers that the model keeps in float32 need no help.
            *(_Float32Linear(m) for m in linears if m.weight.dtype == torch.bfloat16),
            *map(_Float32Experts, grouped_experts(model)),
        ]
        for product in self._products:
            product.module.forward = product  # type: ignore[assignment]
        self.refresh()

    def refresh(self) -> None:
        """Copy the weights anew."""
        for product in self._products:
            product.refresh()

    def release(self) -> None:
        """Give the copies' memory back, until the next refresh."""
        for product in self._products:
            product.release()


class _Float32Linear:
    def __init__(self, linear: torch.nn.Linear) -> None:
        self.module = linear
        self.release()

    def refresh(self) -> None:
        self._weight = self.module.weight.detach().float()
        self._bias = None if self.module.bias is None else self.module.bias.detach().float()

    def release(self) -> None:
        self._weight = torch.empty(0)
        self._bias = None

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(input.float(), self._weight, self._bias).to(input.dtype)


class _Float32Experts:
    def __init__(self, experts: torch.nn.Module) -> None:
        self.module = experts
        self.release()

    def refresh(self) -> None:
        self._copy = _WithWeights(
            self.module,
            {
                name: by_input(parameter.detach().float(), is_transposed=bool(self.module.is_transposed))
                for name, parameter in self.module.named_parameters(recurse=False)
            },
        )

    def release(self) -> None:
        self._copy = None

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return sorted_experts_forward(self._copy, hidden_states, top_k_index, top_k_weights)


class _WithWeights:
    """A module as `sorted_experts_forward` sees it, with other weights."""

    def __init__(self, module: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
        self._module = module
        self.__dict__.update(weights)

    def __getattr__(self, name: str) -> Any:
        # While an object is copied it has nothing yet.
        if name == "_module":
            raise AttributeError(name)
        return getattr(self._module, name)
