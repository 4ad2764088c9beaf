"""`UpdateGroup`: the torch process group over which a trainer broadcasts weights to engines.

It is built on its own store and belongs to no default group, so that a process may be in several and need not
have called `torch.distributed.init_process_group`. The names below which its members find each other are
those that torch's own helper gives a named group, so that members made with `torch.distributed` can join.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from radix_rl.addresses import host_and_port, local_address_towards
from radix_rl.errors import ConfigurationError, WeightUpdateError

GroupBackend = Literal["gloo", "nccl"]

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Names the network interface of every gloo group of the process, which then is the user's choice."""


class UpdateGroup:
    """One member. Every method may block for as long as the group's timeout: keep them off the event loop."""

    def __init__(self, name: str, device: torch.device, group: Any, timeout_s: float) -> None:
        """Use `join` or `host`."""
        self.name = name
        self.device = device
        """Where tensors must lie to be broadcast."""
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)

    @classmethod
    def join(
        cls,
        name: str,
        backend: GroupBackend,
        *,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
    ) -> "UpdateGroup":
        """A member that rank 0 waits for at `address`.

        `timeout_s` bounds joining and later each broadcast. Raises WeightUpdateError if the others do not
        come in time.
        """
        timeout = timedelta(seconds=timeout_s)
        with _meeting(name, rank, world_size, host_and_port(address, port), timeout_s):
            store = TCPStore(address, port, world_size, False, timeout)
            # The way to rank 0 is the way to the others: this machine's own name may be that of no network.
            own_address = local_address_towards(address, port, timeout_s)
            group = _process_group(name, backend, store, own_address, rank, world_size, device, timeout)
        return cls(name, torch.device("cpu") if backend == "gloo" else device, group, timeout_s)

    @classmethod
    def host(
        cls,
        name: str,
        backend: GroupBackend,
        *,
        listener: socket.socket,
        world_size: int,
        device: torch.device,
        timeout_s: float,
    ) -> "UpdateGroup":
        """The member of rank 0. `listener` is bound and is taken over: the others connect to its port."""
        own_address, port = listener.getsockname()[:2]
        listener.listen()
        timeout = timedelta(seconds=timeout_s)
        with _meeting(name, 0, world_size, host_and_port(own_address, port), timeout_s):
            # The group waits for its members itself. A store that gives up waiting ends the process: its
            # thread is still running when it is destroyed.
            store = TCPStore(
                own_address,
                port,
                world_size,
                True,
                timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            group = _process_group(name, backend, store, own_address, 0, world_size, device, timeout)
        return cls(name, torch.device("cpu") if backend == "gloo" else device, group, timeout_s)

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """From rank 0 to all others, in order; contiguous, on `device`, of equal sizes everywhere.

        Raises WeightUpdateError if a member is gone or does not take part in time; the group is then of no
        use any more, and what the tensors hold is undefined.
        """
        group = self._group
        if group is None:
            raise WeightUpdateError(f"group {self.name!r} was closed")
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        try:
            parts = [tensor for tensor in tensors if tensor.numel()]
            if self.device.type == "cpu":
                # gloo knows few dtypes, but moves nothing but bytes.
                parts = [tensor.view(-1).view(torch.uint8) for tensor in parts]
            works = [group.broadcast([part], options) for part in parts]
            for work in works:
                work.wait(self._timeout)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise WeightUpdateError(
                f"group {self.name!r}: a broadcast failed: a member is gone or did not take part within "
                f"{self._timeout.total_seconds():g} s: {_first_line(error)}"
            ) from error

    def close(self) -> None:
        """Leave: what other members still wait for from this one fails there.

        Idempotent. A broadcast of this member that waits in another thread ends at its timeout with gloo, at
        once with nccl.
        """
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            group.abort()


@contextmanager
def _meeting(name: str, rank: int, world_size: int, place: str, timeout_s: float) -> Iterator[None]:
    """Failures to meet the other members as WeightUpdateError."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        raise WeightUpdateError(
            f"group {name!r}: rank {rank} of {world_size} could not meet the others at {place} within "
            f"{timeout_s:g} s: {_first_line(error)}"
        ) from error


def _process_group(
    name: str,
    backend: GroupBackend,
    store: Any,
    own_address: str,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: timedelta,
) -> Any:
    """The process group below the names that torch's own members use."""
    for prefix in (name, f"{name}/", "cpu/" if backend == "gloo" else "cuda/"):
        store = PrefixStore(prefix, store)
    if backend == "nccl":
        torch.cuda.set_device(device)
        options: Any = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return distributed.ProcessGroupNCCL(store, rank, world_size, options)
    if _GLOO_INTERFACE in os.environ:
        return distributed.ProcessGroupGloo(store, rank, world_size, timeout)
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=own_address)]
    return gloo(store, rank, world_size, options)


def group_device(backend: str, device: torch.device) -> torch.device:
    """Where a member of such a group has its tensors. Raises ConfigurationError naming the remedy."""
    if backend == "gloo":
        return torch.device("cpu")
    if backend != "nccl":
        raise ConfigurationError(f"backend: expected gloo or nccl, got {backend!r}")
    if device.type != "cuda":
        raise ConfigurationError(
            f'backend: "nccl" needs a GPU, but the device is {str(device)!r}; use "gloo"'
        )
    return device


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
