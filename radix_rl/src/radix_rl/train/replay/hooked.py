"""`HookedReplay`: the life of a replay by forward hooks, whatever is replayed.

Hooks sit on the live modules while a microbatch is bound, and nowhere else: the plain path is the same model
without hooks, and an exception leaves nothing behind.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch

from radix_rl.errors import ReplayError, TrainingError
from radix_rl.train.batch import TrainBatch
from radix_rl.train.replay.counts import ReplayCounts


@dataclass(kw_only=True)
class Binding:
    """One microbatch's recorded choices, and how often each module has asked for them."""

    calls: dict[int, int] = field(default_factory=dict)
    disagreeing: list[torch.Tensor] = field(default_factory=list)
    recomputing: bool = False


BindingT = TypeVar("BindingT", bound=Binding)


class HookedReplay(ABC, Generic[BindingT]):
    """Replays recorded choices in one model. One thread; one microbatch is bound at a time."""

    kind: ClassVar[str]
    """How error messages call a module."""

    def __init__(self, modules: Mapping[int, torch.nn.Module]) -> None:
        """`modules` by layer or number."""
        self._modules = modules
        self._bound: BindingT | None = None

    @contextmanager
    def microbatch(self, batch: TrainBatch, counts: ReplayCounts) -> Iterator[Self]:
        """Forward and backward pass of `batch` happen inside; call `forward_finished` between them.

        Counts are added when the block ends without an error. Raises ReplayError for rows that do not fit
        the model.
        """
        if self._bound is not None:
            raise TrainingError("a microbatch is bound already; its forward and backward pass must end first")
        binding = self._bind(batch, counts)
        self._bound = binding
        handles = [
            module.register_forward_hook(self._hook(number, binding))
            for number, module in self._modules.items()
        ]
        try:
            yield self
            self._add_disagreeing(counts, sum(int(count) for count in binding.disagreeing))
        finally:
            for handle in handles:
                handle.remove()
            self._bound = None

    def forward_finished(self) -> None:
        """Check the forward pass; from here on calls are recomputation.

        Raises ReplayError unless every module was called once, and for rows that the pass shows to be
        unrecorded.
        """
        binding = self._bound
        assert binding is not None
        wrong = {number: calls for number in self._modules if (calls := binding.calls.get(number, 0)) != 1}
        if wrong:
            raise ReplayError(
                f"replay expected one call of each {self.kind} in a forward pass, got {wrong} (number: "
                f"calls); the model shares, skips or repeats {self.kind}s, which replay does not support"
            )
        self._check_forward(binding)
        binding.recomputing = True

    def _hook(self, number: int, binding: BindingT) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, _args: object, output: Any) -> Any:
            if not binding.recomputing:
                binding.calls[number] = binding.calls.get(number, 0) + 1
                binding.disagreeing.append(self._disagreeing(number, output, binding))
            return self._replayed(number, module, output, binding)

        return hook

    def _check_forward(self, binding: BindingT) -> None:
        """Look at a forward pass that has ended. Raises ReplayError."""
        return

    @abstractmethod
    def _bind(self, batch: TrainBatch, counts: ReplayCounts) -> BindingT:
        """Check the batch's rows and count them. Raises ReplayError."""

    @abstractmethod
    def _disagreeing(self, number: int, output: Any, binding: BindingT) -> torch.Tensor:
        """How many replayed rows of real tokens the module itself, with this output, chose differently."""

    @abstractmethod
    def _replayed(self, number: int, module: torch.nn.Module, output: Any, binding: BindingT) -> Any:
        """The module's output with the recorded choices in it."""

    @abstractmethod
    def _add_disagreeing(self, counts: ReplayCounts, number: int) -> None: ...
