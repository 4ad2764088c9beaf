"""The tracker contract."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Self


class Tracker(ABC):
    """One destination of metrics, used from one thread.

    What `log` and `close` raise becomes a warning and does not end the run.
    """

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's figures, by names such as "train/loss"."""

    @abstractmethod
    def close(self) -> None:
        """Everything logged has arrived when this returns. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
