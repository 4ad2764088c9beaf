"""Routers of Hugging Face models that are told by the names of their classes."""

from typing import ClassVar

import torch

from radix_rl.routers.base import Record, ReplayedRouter
from radix_rl.routers.experts_call import record_calls_in


class KnownClasses(ReplayedRouter):
    """Router classes that weight alike, before experts that are called with the chosen ids."""

    class_names: ClassVar[frozenset[str]]
    """A class has its name here once its forward call was compared with `weights`; a look-alike has not."""

    def matches(self, module: torch.nn.Module) -> bool:
        return type(module).__name__ in self.class_names

    def attach(self, layer: torch.nn.Module, module: torch.nn.Module, record: Record) -> None:
        record_calls_in(layer, record)
