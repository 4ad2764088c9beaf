"""The transport contract: one bucket to every engine of a fleet."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from radix_rl.engines.base import Engine
from radix_rl.errors import ConfigurationError
from radix_rl.weights.bucket import WeightBucket


class WeightTransport(ABC):
    """Stateless between updates: the synchronizer owns begin, commit and abort."""

    name: ClassVar[str]
    """What an engine lists in `EngineCapabilities.weight_transports`."""

    def check(self, engines: Sequence[Engine]) -> None:
        """Raises ConfigurationError if one of the engines cannot take weights this way."""
        for engine in engines:
            can = engine.capabilities.weight_transports
            if self.name not in can:
                raise ConfigurationError(
                    f"weights.transport is {self.name!r}, but {type(engine).__name__} takes weights by "
                    f"{', '.join(can) or 'no transport at all'}; set weights.transport accordingly"
                )

    @abstractmethod
    async def send(self, engines: Sequence[Engine], bucket: WeightBucket) -> int:
        """Hand the bucket to every engine, inside a begun update; the number of bytes that travelled. The
        bucket may be reused when this returns. Raises EngineError of the first engine that failed, after
        the others have ended."""


def create_transport(name: str) -> WeightTransport:
    """By its configured name."""
    if name == "memory":
        from radix_rl.weights.transports.memory import MemoryTransport

        return MemoryTransport()
    if name == "http":
        from radix_rl.weights.transports.http import HttpTransport

        return HttpTransport()
    raise ConfigurationError(f"weights.transport: unknown transport {name!r}; known: memory, http")
