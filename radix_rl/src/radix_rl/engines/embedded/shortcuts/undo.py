"""`ModelChanges`: a record of what was changed about a model object, and the way back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

_ABSENT = object()


class ModelChanges:
    """What a block of code changed about a model's modules, parameters and configurations.

    Seen are the classes of modules, their attributes (`forward` and `training` among them), their hooks, the
    attributes of configurations, and each parameter's memory layout and `requires_grad`. Not seen are values,
    dtypes and devices of tensors.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = list(model.modules())
        self._objects: list[Any] = [*self._modules, *_configurations(self._modules)]
        self._before = [_State(each) for each in self._objects]
        self._parameters = [
            (parameter, parameter.stride(), parameter.requires_grad) for parameter in model.parameters()
        ]
        self._after: list[_State] = []

    def seal(self) -> None:
        """End the record: what is changed from now on stays."""
        self._after = [_State(each) for each in self._objects]
        self._parameters = [
            (parameter, stride, requires_grad)
            for parameter, stride, requires_grad in self._parameters
            if (parameter.stride(), parameter.requires_grad) != (stride, requires_grad)
        ]

    def undo(self) -> None:
        """Change everything back but what somebody changed again in the meantime. Idempotent."""
        for each, before, after in zip(self._objects, self._before, self._after, strict=True):
            if before.kind is not after.kind and type(each) is after.kind:
                each.__class__ = before.kind
            attributes = vars(each)
            for name in before.attributes.keys() | after.attributes.keys():
                was, became = (state.attributes.get(name, _ABSENT) for state in (before, after))
                if was is became or attributes.get(name, _ABSENT) is not became:
                    continue
                if was is _ABSENT:
                    del attributes[name]
                else:
                    attributes[name] = was
            for name, keys in after.hooks.items():
                for key in keys - before.hooks[name]:
                    attributes[name].pop(key, None)
        for parameter, stride, requires_grad in self._parameters:
            _lay_out(parameter, stride)
            parameter.requires_grad_(requires_grad)
        self._objects, self._before, self._after, self._parameters = [], [], [], []


@contextmanager
def recorded_changes(model: torch.nn.Module) -> Iterator[ModelChanges]:
    """Record what the block changes about the model; undone at once if the block raises."""
    changes = ModelChanges(model)
    try:
        yield changes
    except BaseException:
        changes.seal()
        changes.undo()
        raise
    changes.seal()


class _State:
    """The class, attributes and hooks of a module or configuration at one moment."""

    def __init__(self, each: Any) -> None:
        self.kind = type(each)
        self.attributes = dict(vars(each))
        self.hooks = {
            name: frozenset(value)
            for name, value in self.attributes.items()
            if "_hooks" in name and isinstance(value, dict)
        }


def _configurations(modules: list[torch.nn.Module]) -> list[Any]:
    found: dict[int, Any] = {}
    waiting = [module.config for module in modules if isinstance(module, PreTrainedModel)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _lay_out(parameter: torch.nn.Parameter, stride: tuple[int, ...]) -> None:
    # Parameters that sleep have no memory to lay out.
    if parameter.dim() == len(stride) and parameter.stride() != stride:
        data = torch.empty_strided(parameter.shape, stride, dtype=parameter.dtype, device=parameter.device)
        parameter.data = data.copy_(parameter.data)
