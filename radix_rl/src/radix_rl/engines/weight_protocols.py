"""What a weight transport may ask of an engine beyond the contract: one protocol a way to send tensors.

An engine that lists a transport in `EngineCapabilities.weight_transports` has the methods of its protocol;
`WeightTransport.check` looks at both, once. "memory" asks for nothing that `Engine` does not have.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from radix_rl.buckets.bucket import TensorSpec


@runtime_checkable
class TakesEncodedBuckets(Protocol):
    """Asked by "http"."""

    async def update_weights_encoded(self, body: bytes) -> None:
        """As `Engine.update_weights`, with a bucket that `encode_bucket` made a body of."""
        ...


@runtime_checkable
class TakesCheckpoints(Protocol):
    """Asked by "disk"."""

    async def load_weights(self, path: Path, version: str) -> None:
        """Take a whole checkpoint from a folder, inside a begun update. Raises WeightUpdateError."""
        ...


@runtime_checkable
class TakesBroadcasts(Protocol):
    """Asked by "broadcast". Raise WeightUpdateError and EngineError."""

    @property
    def base_url(self) -> str:
        """How error messages call the engine."""
        ...

    @property
    def num_weight_ranks(self) -> int:
        """Members that it has in a process group."""
        ...

    async def knows_weight_group(self, name: str) -> bool:
        """Whether it is still a member."""
        ...

    async def join_weight_group(
        self, name: str, backend: str, *, address: str, port: int, rank_offset: int, world_size: int
    ) -> None:
        """Return when all members have met; its ranks count from `rank_offset`, rank 0 is at the address."""
        ...

    async def leave_weight_group(self, name: str) -> None: ...

    async def receive_weights(self, specs: Sequence[TensorSpec], group_name: str) -> None:
        """Take one flattened bucket that rank 0 broadcasts meanwhile, inside a begun update."""
        ...
