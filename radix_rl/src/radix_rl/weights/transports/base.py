"""The transport contract: one bucket to every engine of a fleet."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

from radix_rl.buckets.bucket import WeightBucket
from radix_rl.engines.base import Engine, WeightNames
from radix_rl.errors import ConfigurationError

EngineT = TypeVar("EngineT")


class WeightTransport(ABC, Generic[EngineT]):
    """One way for tensors to travel to engines that have the methods of `EngineT`.

    The synchronizer owns begin, commit and abort; a transport may keep what outlives one update, such as
    connections, until `close`."""

    name: ClassVar[str]
    """What an engine lists in `EngineCapabilities.weight_transports`."""
    needs: ClassVar[type] = Engine
    """`EngineT`: the contract, or a protocol of `radix_rl.engines.weight_protocols`."""

    def check(self, engines: Sequence[Engine]) -> None:
        """Look at the engines once, before any other call. ConfigurationError if one takes no weights so."""
        for engine in engines:
            can = engine.capabilities.weight_transports
            if self.name not in can:
                raise ConfigurationError(
                    f"weights.transport is {self.name!r}, but {type(engine).__name__} takes weights by "
                    f"{', '.join(can) or 'no transport at all'}; set weights.transport accordingly"
                )
            if not isinstance(engine, self.needs):
                raise ConfigurationError(
                    f"weights.transport {self.name!r}: {type(engine).__name__} lists it, but lacks methods "
                    f"of {self.needs.__name__} (radix_rl.engines.weight_protocols)"
                )

    def weight_names(self, engines: Sequence[Engine]) -> WeightNames:
        """How the tensors of `send` are to be called.

        Raises ConfigurationError for a fleet that disagrees.
        """
        names: set[WeightNames] = {engine.capabilities.weight_names for engine in engines}
        if len(names) > 1:
            raise ConfigurationError(
                f"weights.transport {self.name!r}: the engines call their weights differently "
                f"({', '.join(sorted(names))}); use servers of one kind, or another transport"
            )
        return names.pop()

    async def prepare(self, engines: Sequence[EngineT]) -> None:
        """Before an update begins: meet the engines where that is needed. Raises EngineError."""
        return

    @abstractmethod
    async def send(self, engines: Sequence[EngineT], bucket: WeightBucket) -> int:
        """Hand the bucket to every engine, inside a begun update; the number of bytes that travelled.

        The bucket may be reused when this returns. Raises EngineError of the first engine that failed, after
        the others have ended.
        """

    async def finish(self, engines: Sequence[EngineT], version: str) -> None:
        """After the last bucket and before the commit: every engine has every tensor when this returns."""
        return

    async def abandon(self) -> None:
        """The update failed; forget what was sent. Raises nothing."""
        return

    async def close(self, engines: Sequence[EngineT]) -> None:
        """After the last update. Raises nothing."""
        return
