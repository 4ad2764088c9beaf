"""Less time around a model's arithmetic, in steps whose few tokens leave little arithmetic to do."""

from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from radix_rl.engines.embedded.shortcuts.bare_forward import use_bare_forward
from radix_rl.engines.embedded.shortcuts.norms import use_short_norms
from radix_rl.engines.embedded.shortcuts.rotary import use_short_rotary


def cut_overheads(model: PreTrainedModel) -> None:
    """Changes no bit of what the model computes. The last thing done to a model, since its modules change
    their types: they cannot be pickled afterwards. From here on submodules are exchanged by assignment only,
    not through `_modules`, and parameters by assignment to their `data`, not by torch's `functional_call`.
    """
    use_short_norms(model)
    use_short_rotary(model)
    use_bare_forward(model)
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


def own_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """What its class was before `cut_overheads`."""
    kind = type(module)
    return kind.__bases__[0] if hasattr(kind, "is_called_directly") else kind


@cache
def _called_directly(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The same class, of which a call without gradients begins with `forward` where the module has no hooks
    of its own. torch's way there, and transformers' for layers that may be checkpointed, costs the step of a
    small model three percent.
    """
    if hasattr(kind, "is_called_directly"):
        return kind

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._forward_pre_hooks or self._forward_hooks or torch.is_grad_enabled():
            return kind.__call__(self, *args, **kwargs)
        return self.forward(*args, **kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {"__call__": call, "is_called_directly": True, **names})
