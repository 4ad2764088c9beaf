"""`UpdateGroups`: the process groups in which this server receives broadcasts of weights."""

import asyncio
from collections.abc import Sequence

import torch

from radix_rl.buckets.bucket import WeightBucket
from radix_rl.concurrency import in_own_thread, to_end
from radix_rl.errors import ConfigurationError, RequestError, WeightUpdateError
from radix_rl.weights.update_group import UpdateGroup, group_device

_MAX_WORLD_SIZE = 2**31 - 1

_GRACE_S = 2.0
"""What torch itself says of a meeting that failed in time is waited for this long."""


class UpdateGroups:
    """By name.

    Joining and receiving happen on threads of their own, so that the event loop and the engine go on; each
    ends soon after `timeout_s` at the latest.
    """

    def __init__(self, device: str, timeout_s: float) -> None:
        """`device`: the engine's, where nccl receives."""
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        self._groups: dict[str, UpdateGroup] = {}
        self._joining: set[str] = set()

    def names(self) -> list[str]:
        return sorted(self._groups)

    async def join(
        self, name: str, backend: str, address: str, port: int, rank: int, world_size: int
    ) -> None:
        """Raises RequestError for what cannot be, WeightUpdateError if the others do not come in time."""
        if not name:
            raise RequestError("group_name: expected a name, got an empty one")
        if name in self._groups or name in self._joining:
            raise RequestError(
                f"group_name: this server is in a group {name!r} already; call "
                "/destroy_weights_update_group first, or use another name"
            )
        if world_size > _MAX_WORLD_SIZE:
            raise RequestError(f"world_size: expected at most {_MAX_WORLD_SIZE}, got {world_size}")
        if not 0 < rank < world_size:
            raise RequestError(
                f"rank_offset: expected 1 to world_size - 1 = {world_size - 1} (rank 0 is the trainer's), "
                f"got {rank}"
            )
        if not 0 < port < 65536:
            raise RequestError(f"master_port: expected 1 to 65535, got {port}")
        try:
            device = group_device(backend, self._device)
        except ConfigurationError as error:
            raise RequestError(str(error)) from error

        def join() -> UpdateGroup:
            return UpdateGroup.join(
                name,
                "nccl" if backend == "nccl" else "gloo",
                address=address,
                port=port,
                rank=rank,
                world_size=world_size,
                device=device,
                timeout_s=self._timeout_s,
            )

        self._joining.add(name)
        try:
            # torch waits without end for a master that takes the connection and never answers.
            async with asyncio.timeout(self._timeout_s + _GRACE_S):
                self._groups[name] = await in_own_thread(join)
        except TimeoutError as error:
            raise WeightUpdateError(
                f"group {name!r}: rank {rank} of {world_size} could not meet the others at {address}:{port} "
                f"within {self._timeout_s:g} s: whoever is there gave no answer; is it the trainer's address?"
            ) from error
        finally:
            self._joining.discard(name)

    def device_of(self, name: str) -> torch.device:
        """Where the tensors of this group's broadcasts must lie.

        Raises RequestError if there is no such group.
        """
        return self._group(name).device

    async def receive(self, name: str, bucket: WeightBucket, *, packed: bool) -> None:
        """Fill `bucket` with what rank 0 broadcasts: in one piece, or tensor by tensor.

        After a failure (WeightUpdateError) the group is gone, since what its members have seen differs.
        """
        group = self._group(name)
        tensors: Sequence[torch.Tensor] = (
            [bucket.buffer] if packed else [tensor for _, tensor in bucket.tensors()]
        )
        try:
            await in_own_thread(lambda: group.broadcast(list(tensors)))
        except BaseException:
            if self._groups.get(name) is group:
                del self._groups[name]
            await to_end(in_own_thread(group.close))
            raise

    async def leave(self, name: str) -> None:
        """Raises RequestError if there is no such group."""
        group = self._group(name)
        del self._groups[name]
        await in_own_thread(group.close)

    def _group(self, name: str) -> UpdateGroup:
        group = self._groups.get(name)
        if group is None:
            known = ", ".join(map(repr, self.names())) or "none"
            raise RequestError(
                f"group_name: this server is in no group {name!r} (it is in: {known}); call "
                "/init_weights_update_group first"
            )
        return group
