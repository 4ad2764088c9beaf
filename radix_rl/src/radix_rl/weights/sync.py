"""`WeightSynchronizer`: a new version of the weights, to the whole fleet or not at all."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from radix_rl.buckets.bucket import WeightBucket, pack_buckets
from radix_rl.buckets.finite import FiniteCheck
from radix_rl.concurrency import to_end
from radix_rl.engines.base import Engine
from radix_rl.engines.fleet import on_all, outcomes_of
from radix_rl.errors import ConfigurationError, EngineError, WeightUpdateError
from radix_rl.openmp_pool import pool_ended_after
from radix_rl.weights.transports.base import WeightTransport

NamedTensors = Iterable[tuple[str, torch.Tensor]]

logger = logging.getLogger(__name__)


class WeightSynchronizer:
    """Begin, buckets, commit, while the engines are paused in place; runs in the trainer's process (rank 0).

    Until every engine has every bucket, nothing is committed: on any failure the update is dropped
    everywhere and the old version stays in force.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        transport: WeightTransport[Any],
        *,
        bucket_bytes: int,
        checkpoint_names: Callable[[NamedTensors], NamedTensors] | None = None,
    ) -> None:
        """Prepare weight sync for started engines.

        `checkpoint_names` turns a model's tensors into a checkpoint's, for transports and engines that want
        those. Raises ConfigurationError if an engine cannot take weights by this transport.
        """
        transport.check(engines)
        self._rename = checkpoint_names if transport.weight_names(engines) == "checkpoint" else None
        if transport.weight_names(engines) == "checkpoint" and checkpoint_names is None:
            raise ConfigurationError(
                f"weights.transport {transport.name!r} sends these engines a checkpoint's tensors; give "
                "checkpoint_names, such as radix_rl.buckets.checkpoint_names.CheckpointNames"
            )
        self._engines = list(engines)
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """The last version that this synchronizer committed."""
        return self._version

    async def sync(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
        """Put a version, higher than the last, in force on every engine; timings and sizes as metrics.

        `named_tensors` is consumed bucket by bucket. Raises WeightUpdateError, which says what is in force,
        and EngineError. The engines go on generating afterwards in either case, except those that an
        EngineError says could not be resumed.
        """
        if self._version is not None and version <= self._version:
            raise WeightUpdateError(f"weight version: expected more than {self._version}, got {version!r}")
        started = time.perf_counter()
        try:
            await on_all(self._engines, lambda engine: engine.pause("in_place"))
            paused = time.perf_counter()
            metrics = await self._update(str(version), named_tensors)
        except BaseException:
            # An engine that failed to pause ignores it; one that died must not keep the others paused.
            await to_end(_clean_up(self._engines, "resume", lambda engine: engine.resume()))
            raise
        self._version = version
        await to_end(self._resume(version))
        return metrics | {
            "weights/pause_s": paused - started,
            "weights/sync_s": time.perf_counter() - started,
        }

    async def _resume(self, version: int) -> None:
        """Let every engine go on. Raises EngineError for one that may have stayed paused."""
        for engine, error in zip(
            self._engines, await outcomes_of(self._engines, lambda engine: engine.resume()), strict=True
        ):
            if error is not None:
                raise EngineError(
                    f"weight version {version} is in force, but {type(engine).__name__} could not be resumed "
                    f"and may hold its requests: {error}"
                ) from error

    async def _update(
        self, version: str, named_tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> dict[str, float]:
        try:
            await self._transport.prepare(self._engines)
            await on_all(self._engines, lambda engine: engine.begin_weight_update(version))
            if self._rename is not None:
                named_tensors = self._rename(named_tensors)
            with pool_ended_after():
                metrics = await self._send(pack_buckets(named_tensors, self._bucket_bytes))
            await self._transport.finish(self._engines, version)
        except BaseException:
            # Shielded: a cancelled trainer must not leave an engine inside an update.
            await to_end(self._give_up())
            raise
        started = time.perf_counter()
        # Some engines may have committed: a cancelled trainer must not leave the others behind.
        await to_end(self._commit(version))
        return metrics | {"weights/commit_s": time.perf_counter() - started}

    async def _give_up(self) -> None:
        await self._transport.abandon()
        await _clean_up(self._engines, "abort_weight_update", _abort)

    async def close(self) -> None:
        """Lets go of what the transport keeps between updates. The engines stay the caller's."""
        await self._transport.close(self._engines)

    async def _send(self, buckets: Iterator[WeightBucket]) -> dict[str, float]:
        pack_s = send_s = 0.0
        num_buckets = sent_bytes = 0
        while True:
            started = time.perf_counter()
            bucket = next(buckets, None)
            if bucket is not None:
                _check_finite(bucket)
            packed = time.perf_counter()
            pack_s += packed - started
            if bucket is None:
                break
            sent_bytes += await self._transport.send(self._engines, bucket)
            num_buckets += 1
            send_s += time.perf_counter() - packed
        return {
            "weights/pack_s": pack_s,
            "weights/send_s": send_s,
            "weights/buckets": float(num_buckets),
            "weights/sent_bytes": float(sent_bytes),
        }

    async def _commit(self, version: str) -> None:
        """Commit everywhere.

        An engine that cannot follow the others gives its weights up, so that no answer comes from the version
        that the rest of the fleet has left.
        """
        errors = await outcomes_of(self._engines, lambda engine: engine.commit_weight_update(version))
        failed = [
            (engine, error) for engine, error in zip(self._engines, errors, strict=True) if error is not None
        ]
        if not failed:
            return
        behind = [engine for engine, _ in failed]
        await _clean_up(behind, "abort_weight_update", _abort)
        if len(failed) == len(self._engines):
            raise WeightUpdateError(
                f"no engine could commit weight version {version}; the version before stays in force: "
                f"{failed[0][1]}"
            ) from failed[0][1]
        await _clean_up(behind, "sleep", lambda engine: engine.sleep(("weights",)))
        raise WeightUpdateError(
            f"{len(failed)} of {len(self._engines)} engines could not commit weight version {version} and "
            f"were put to sleep; the others are at {version}: {failed[0][1]}"
        ) from failed[0][1]


def _check_finite(bucket: WeightBucket) -> None:
    check = FiniteCheck()
    for name, tensor in bucket.tensors():
        check.add(name, tensor)
    name = check.first_not_finite()
    if name is not None:
        raise WeightUpdateError(
            f"weight {name!r} of the trainer has values that are not finite (NaN or infinity); nothing was "
            "committed and the version before stays in force. A lower learning rate or max_grad_norm keeps "
            "weights from diverging"
        )


async def _clean_up(
    engines: Sequence[Engine], name: str, call: Callable[[Engine], Awaitable[object]]
) -> None:
    """Call every engine, past those that fail: the error that led here is the one to raise."""
    for engine, error in zip(engines, await outcomes_of(engines, call), strict=True):
        if error is not None:
            logger.warning("%s failed on %s: %s", name, type(engine).__name__, error)


async def _abort(engine: Engine) -> None:
    await engine.abort_weight_update()


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by state-dict name; tied ones once, under their first name.

    The tensors are the model's own, detached.
    """
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()
