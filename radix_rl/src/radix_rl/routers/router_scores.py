"""Routers that return a score for every expert, 0 where not chosen: `(scores [tokens, experts], logits)`.

Llama 4 multiplies by these scores instead of passing ids on; the chosen experts are those of the largest
logits.
"""

from typing import Any, ClassVar

import torch

from radix_rl.routers.base import Record, Router


class RouterScores(Router):
    name: ClassVar[str] = "router_scores"

    def matches(self, module: torch.nn.Module) -> bool:
        return type(module).__name__ == "Llama4Router" and hasattr(module, "top_k")

    def attach(self, layer: torch.nn.Module, module: torch.nn.Module, record: Record) -> None:
        top_k = int(module.top_k)  # type: ignore[arg-type]

        def hook(
            _module: torch.nn.Module, _args: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
        ) -> None:
            logits = output[1]
            record(logits.topk(top_k, dim=-1).indices)

        module.register_forward_hook(hook)
