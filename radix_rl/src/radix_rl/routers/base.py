"""The contract of a router kind: what the engine asks of it, and what the trainer asks of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

Record = Callable[[torch.Tensor], None]
"""Takes the choices of one forward call, `[..., k]`, in the order of the flattened input tokens. They are
kept for several steps: of a module that writes them into the same memory again, pass a copy.
"""


class Router(ABC):
    """One way in which MoE layers choose experts, whose choices can be recorded.

    Stateless and made without arguments; one instance serves all models.
    """

    name: ClassVar[str]

    @abstractmethod
    def matches(self, module: torch.nn.Module) -> bool:
        """Whether this is a module by which the kind is recognised. A MoE layer has exactly one."""

    @abstractmethod
    def attach(self, layer: torch.nn.Module, module: torch.nn.Module, record: Record) -> None:
        """Engine: make every forward call of `layer` pass its choices to `record`, without changing a value.

        `module` is the one of the layer's modules that matches. Raises ConfigurationError for a layer whose
        choices cannot be seen.
        """


class ReplayedRouter(Router):
    """A kind that the trainer can give the experts to.

    The module that matches is the router itself. It has `num_experts` and `top_k`, and its forward call
    returns `(logits [n, experts], weights [n, k], experts [n, k])`, the interface of transformers 5. Replay
    keeps its logits, puts the recorded experts in the place of its own, and weights them by the live logits,
    so that gradients reach the router.
    """

    @abstractmethod
    def weights(self, router: Any, logits_ne: torch.Tensor, experts_nk: torch.Tensor) -> torch.Tensor:
        """Trainer: the weights `[n, k]` of the experts `experts_nk`.

        Repeats the router's own operations in their order, so that its own choice gets its own weights.
        Replay casts the result to the dtype of the router's own answer.
        """
