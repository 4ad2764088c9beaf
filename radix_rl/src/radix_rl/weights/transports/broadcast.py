"""`broadcast`: to servers, SGLang's own or ours, over a process group.

Its members are the trainer (rank 0) and all ranks of all engines.
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch

from radix_rl.addresses import bind_tcp, host_and_port
from radix_rl.buckets.bucket import WeightBucket
from radix_rl.buckets.packed import pack
from radix_rl.concurrency import cancel_and_wait, in_own_thread, outcomes
from radix_rl.engines.weight_protocols import TakesBroadcasts
from radix_rl.errors import ConfigurationError, EngineError, WeightUpdateError
from radix_rl.weights.transports.base import WeightTransport
from radix_rl.weights.update_group import GroupBackend, UpdateGroup, group_device

logger = logging.getLogger(__name__)

_EVERY_INTERFACE = ("", "0.0.0.0", "::")
_GRACE_S = 5.0
"""How long the answers of engines are waited for after a broadcast that failed."""


class BroadcastTransport(WeightTransport[TakesBroadcasts]):
    """The group is made before the first update and kept.

    It is made anew, under another name, after a failure and when an engine no longer knows it, such as one
    that was started again.
    """

    name: ClassVar[str] = "broadcast"
    needs: ClassVar[type] = TakesBroadcasts

    def __init__(
        self, *, backend: GroupBackend, host: str, port: int, device: torch.device, timeout_s: float
    ) -> None:
        """`host` is an address of this machine that the engines reach; port 0 lets the system choose.

        `timeout_s` bounds the meeting and each broadcast. Raises ConfigurationError for nccl without a GPU
        and for a host that means every interface.
        """
        if host in _EVERY_INTERFACE:
            raise ConfigurationError(
                f"weights.host: {host!r} means every interface, which is nowhere that an engine could "
                "connect to; give the address of this machine that the engines reach"
            )
        self._backend: GroupBackend = backend
        self._device = group_device(backend, device)
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._group: UpdateGroup | None = None
        self._forsaken: set[str] = set()
        """Groups that failed here; engines may still be members."""

    async def prepare(self, engines: Sequence[TakesBroadcasts]) -> None:
        if self._group is not None:
            name = self._group.name
            if all(await asyncio.gather(*(engine.knows_weight_group(name) for engine in engines))):
                return
        await self._leave(engines)
        self._group = await self._meet(engines)

    async def send(self, engines: Sequence[TakesBroadcasts], bucket: WeightBucket) -> int:
        group = self._group
        if group is None:
            raise WeightUpdateError("broadcast: the group of the engines failed; begin a new update")
        packed = pack(bucket, group.device)
        answers = [
            asyncio.ensure_future(engine.receive_weights(packed.specs, group.name)) for engine in engines
        ]
        cast = asyncio.ensure_future(in_own_thread(partial(group.broadcast, [packed.buffer])))
        try:
            await asyncio.wait(
                [*answers, cast], timeout=self._timeout_s + _GRACE_S, return_when=asyncio.FIRST_EXCEPTION
            )
            if all(task.done() and task.exception() is None for task in (*answers, cast)):
                return packed.buffer.numel() * len(engines)
            # The group is out of step: without it the members that still wait fail too, and answer.
            await self.abandon()
            await asyncio.wait(answers, timeout=_GRACE_S)
            raise _first_error(engines, answers, cast, self._timeout_s)
        finally:
            await cancel_and_wait((*answers, cast))

    async def abandon(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._forsaken.add(group.name)
            await in_own_thread(group.close)

    async def close(self, engines: Sequence[TakesBroadcasts]) -> None:
        await self._leave(engines)

    async def _leave(self, engines: Sequence[TakesBroadcasts]) -> None:
        """Every group that there was. Members that have lost one already say so; that is what was wanted."""
        await self.abandon()
        names, self._forsaken = self._forsaken, set()
        calls = {
            asyncio.ensure_future(engine.leave_weight_group(name)): name
            for name in names
            for engine in engines
        }
        if not calls:
            return
        _, late = await asyncio.wait(calls, timeout=_GRACE_S)
        await cancel_and_wait(late)
        for error in await outcomes(calls):
            if error is not None:
                logger.debug("leaving a group of weight updates: %s", error)

    async def _meet(self, engines: Sequence[TakesBroadcasts]) -> UpdateGroup:
        try:
            listener = bind_tcp(self._host, self._port)
        except OSError as error:
            raise ConfigurationError(
                f"weights.host, weights.port: cannot listen on {host_and_port(self._host, self._port)}: "
                f"{error.strerror}; give an address of this machine that the engines reach"
            ) from error
        name, port = f"radix-rl-{uuid.uuid4().hex[:12]}", listener.getsockname()[1]
        self._forsaken.add(name)
        world_size = 1 + sum(engine.num_weight_ranks for engine in engines)
        joins, rank = [], 1
        for engine in engines:
            joins.append(
                asyncio.ensure_future(
                    engine.join_weight_group(
                        name,
                        self._backend,
                        address=self._host,
                        port=port,
                        rank_offset=rank,
                        world_size=world_size,
                    )
                )
            )
            rank += engine.num_weight_ranks

        def host() -> UpdateGroup:
            return UpdateGroup.host(
                name,
                self._backend,
                listener=listener,
                world_size=world_size,
                device=self._device,
                timeout_s=self._timeout_s,
            )

        hosting = asyncio.ensure_future(in_own_thread(host))
        try:
            await asyncio.wait(
                [*joins, hosting], timeout=self._timeout_s + _GRACE_S, return_when=asyncio.FIRST_EXCEPTION
            )
            if all(task.done() and task.exception() is None for task in (*joins, hosting)):
                self._forsaken.discard(name)
                return hosting.result()
            raise _first_error(engines, joins, hosting, self._timeout_s)
        finally:
            await cancel_and_wait((*joins, hosting))


def _first_error(
    engines: Sequence[TakesBroadcasts],
    answers: Sequence["asyncio.Future[None]"],
    ours: "asyncio.Future",
    timeout_s: float,
) -> BaseException:
    """An engine's own words tell more than what the group's breaking looks like from here."""
    for answer in answers:
        if answer.done() and not answer.cancelled() and (error := answer.exception()) is not None:
            if isinstance(error, EngineError | ConfigurationError):
                return error
            return WeightUpdateError(f"broadcast: {error}")
    late = [engine.base_url for engine, answer in zip(engines, answers, strict=True) if not answer.done()]
    if ours.done() and not ours.cancelled() and (error := ours.exception()) is not None:
        waiting = f"; no answer from {', '.join(late)}" if late else ""
        return WeightUpdateError(f"broadcast: {error}{waiting}")
    return WeightUpdateError(f"broadcast: no answer within {timeout_s:g} s from {', '.join(late) or 'all'}")
