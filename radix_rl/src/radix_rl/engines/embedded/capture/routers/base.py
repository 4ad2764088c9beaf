"""The adapter contract: recognise a module and tell the layer's choices."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch

Record = Callable[[torch.Tensor], None]
"""Takes the choices of one forward call, `[..., k]`, in the order of the flattened input tokens. They are
kept for several steps: of a module that writes them into the same memory again, pass a copy.
"""


class RouterAdapter(ABC):
    """Knows one interface through which MoE layers choose experts. Stateless; one instance serves all
    models.
    """

    name: ClassVar[str]

    @abstractmethod
    def matches(self, module: torch.nn.Module) -> bool:
        """True if this module's forward call reveals the chosen experts. Exactly one module of a MoE layer
        must match.
        """

    @abstractmethod
    def attach(self, module: torch.nn.Module, record: Record) -> None:
        """Change the module so that every forward call passes its choices to `record`. Must not change any
        value.
        """
