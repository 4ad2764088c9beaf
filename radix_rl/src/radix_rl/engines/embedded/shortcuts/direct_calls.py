"""Calls of modules without what torch and transformers do around them."""

from functools import cache
from typing import Any

import torch


def use_direct_calls(model: torch.nn.Module) -> None:
    """Let modules without hooks be called by their `forward`, and attributes be found at once."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList):
            if type(module) is torch.nn.ModuleList:
                module.__class__ = _PlainSlices
            continue
        # Python looks here first; torch's own look-up is a function that runs only when that fails.
        module.__dict__.update(module._modules)
        module.__dict__.update(module._parameters)
        if module is not model:
            module.__class__ = _called_directly(type(module))


class _PlainSlices(torch.nn.ModuleList):
    """Transformers goes through `layers[:n]` in every step, for which torch makes a new module of them."""

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index] if isinstance(index, slice) else super().__getitem__(index)


@cache
def _called_directly(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The same class, where a call without gradients of a module without hooks begins with `forward`.

    torch's way there, and transformers' for layers that may be checkpointed, costs the step of a small model
    three percent.
    """

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._forward_pre_hooks or self._forward_hooks or torch.is_grad_enabled():
            return kind.__call__(self, *args, **kwargs)
        return self.forward(*args, **kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {"__call__": call, **names})
