"""`DistributedTrainer`: several ranks with FSDP2.

Rank 0 is the run's own process; the others are its children.

Rank 0 tells the children what to do over pipes, does the same itself, and the collectives of FSDP bring them
together.
"""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from radix_rl.addresses import bind_tcp
from radix_rl.config import RunConfig
from radix_rl.config.output_store import OutputStoreConfig
from radix_rl.errors import CheckpointError, ConfigurationError, RadixError, TrainingError
from radix_rl.launch.store import RunStore, connect
from radix_rl.model_layers import decoder_layers
from radix_rl.observe.quiet import quiet_transformers
from radix_rl.rollout.sample import decode_samples, encode_samples
from radix_rl.train.checkpoint import RunState
from radix_rl.train.collectives import ProcessRanks
from radix_rl.train.plan.share_out import assign_to_ranks
from radix_rl.train.plan.step_plan import SampleTask
from radix_rl.train.rank_trainer import RankTrainer, build_rank
from radix_transfer_plugins import OutputStore

_LOOPBACK = "127.0.0.1"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
STOP_TIMEOUT_S = 10.0
REPORT_TIMEOUT_S = 5.0
"""How long a failing child may take to say why."""


@dataclass(frozen=True)
class _ChildSetup:
    """What a child needs to join; pickled."""

    config: RunConfig
    rank: int
    port: int
    store: OutputStoreConfig | None
    checkpoint: Path | None


class DistributedTrainer:
    """Several ranks as one trainer, used by one thread at a time in the process that built it.

    Each rank reads only its own samples' outputs.
    """

    def __init__(self, config: RunConfig, run_store: RunStore | None, checkpoint: Path | None) -> None:
        """Start the children and wait until every rank has its shard.

        Raises TrainingError with a child's traceback.
        """
        self._size = config.train.num_ranks
        num_samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        if num_samples // config.train.minibatches < self._size:
            raise ConfigurationError(
                f"train.num_ranks is {self._size}, but a minibatch has "
                f"{num_samples // config.train.minibatches} samples; every rank needs one"
            )
        self._children: list[tuple[BaseProcess, Connection]] = []
        rendezvous = _rendezvous(self._size)
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(1, self._size):
                ours, theirs = context.Pipe()
                setup = _ChildSetup(
                    config,
                    rank,
                    rendezvous.port,
                    None if run_store is None else run_store.settings,
                    checkpoint,
                )
                child = context.Process(
                    target=_child_main, args=(setup, theirs), name=f"trainer-rank-{rank}", daemon=True
                )
                child.start()
                theirs.close()
                self._children.append((child, ours))
            _join_group(config, rendezvous, 0)
            store = None if run_store is None else run_store.store
            self._rank = self._guarded(lambda: _build_sharded(config, store, checkpoint))
            self._await_children()
        except BaseException:
            self.close()
            raise

    def step(
        self, minibatches: Sequence[Sequence[SampleTask]], *, measure_without_replay: bool = False
    ) -> dict[str, float]:
        shares: list[list[list[SampleTask]]] = [[] for _ in range(self._size)]
        for minibatch in minibatches:
            for share, tasks in zip(shares, share_out(minibatch, self._size), strict=True):
                share.append(tasks)
        self._tell(
            *(("step", [_encode(tasks) for tasks in share], measure_without_replay) for share in shares[1:])
        )
        metrics = self._guarded(
            lambda: self._rank.step(shares[0], measure_without_replay=measure_without_replay)
        )
        self._await_children()
        return metrics

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate to the end: every tensor is gathered by all ranks together."""
        self._tell(*[("weights",)] * len(self._children))
        iterator = self._rank.named_weights()
        while (item := self._guarded(lambda: next(iterator, None))) is not None:
            yield item
        self._await_children()

    def save(self, state: RunState) -> Path:
        self._tell(*[("save", state)] * len(self._children))
        try:
            path = self._guarded(lambda: self._rank.save(state))
        except CheckpointError:
            # Only the writing failed, which is rank 0's alone: the others go on.
            self._await_children()
            raise
        self._await_children()
        return path

    @property
    def optimizer_steps(self) -> int:
        return self._rank.optimizer_steps

    def close(self) -> None:
        """Ends the children, also those that hang. Idempotent."""
        children, self._children = self._children, []
        for _, pipe in children:
            pipe.close()
        for child, _ in children:
            child.join(STOP_TIMEOUT_S)
            if child.is_alive():
                child.kill()
                child.join()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _tell(self, *messages: tuple) -> None:
        """One message to each child."""
        for (child, pipe), message in zip(self._children, messages, strict=True):
            try:
                pipe.send(message)
            except OSError as error:
                report = _receive(pipe, REPORT_TIMEOUT_S)
                raise TrainingError(f"{child.name} failed:\n{report}") from error

    def _guarded(self, call: Any) -> Any:
        """Run rank 0's part.

        A child that failed breaks its collectives; the child's traceback is the reason to give.
        """
        try:
            return call()
        except RadixError:
            raise
        except RuntimeError as error:
            for child, pipe in self._children:
                report = _receive(pipe, REPORT_TIMEOUT_S)
                if report is not None:
                    raise TrainingError(f"{child.name} failed:\n{report}") from error
            raise

    def _await_children(self) -> None:
        for child, pipe in self._children:
            report = _receive(pipe, COLLECTIVE_TIMEOUT.total_seconds())
            if report is not None:
                raise TrainingError(f"{child.name} failed:\n{report}")


def share_out(minibatch: Sequence[SampleTask], num_ranks: int) -> list[list[SampleTask]]:
    """Each rank's tasks.

    A rank that would have none gets one that counts for nothing: sharded models run in step, and dynamic
    sampling may leave fewer samples than ranks.
    """
    assigned = assign_to_ranks([len(task.sample.tokens) for task in minibatch], num_ranks)
    return [
        [minibatch[position] for position in positions] or [_without_weight(minibatch[0])]
        for positions in assigned
    ]


def _without_weight(task: SampleTask) -> SampleTask:
    masked = msgspec.structs.replace(task.sample, loss_mask=[0] * len(task.sample.loss_mask))
    return SampleTask(sample=masked, advantage=0.0, loss_scale=0.0)


def shard_model(model: PreTrainedModel, device: str, num_ranks: int) -> None:
    """FSDP2 over all ranks: each decoder layer is a unit, and what is left is another. In place."""
    with _gloo_on_loopback():
        mesh = init_device_mesh(torch.device(device).type, (num_ranks,))
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _receive(pipe: Connection, timeout_s: float) -> str | None:
    """None when the child is done; its traceback, or that it died, otherwise."""
    try:
        if not pipe.poll(timeout_s):
            return f"it did not answer within {timeout_s:g} s"
        return pipe.recv()
    except (EOFError, OSError):
        return "the process died without a word; it may have been killed for its memory"


def _rendezvous(num_ranks: int) -> TCPStore:
    """The store at which the ranks meet. torch alone would listen on every interface of the machine."""
    listener = bind_tcp(_LOOPBACK, 0)
    port = listener.getsockname()[1]
    listener.listen()
    return TCPStore(
        _LOOPBACK, port, num_ranks, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


@contextmanager
def _gloo_on_loopback() -> Iterator[None]:
    """Groups made inside listen on the loopback interface only, unless the user chose one.

    gloo takes its interface from the environment alone; without, it is that of the machine's name.
    """
    if _GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[_GLOO_INTERFACE] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]


def _join_group(config: RunConfig, rendezvous: TCPStore, rank: int) -> None:
    backend = "nccl" if torch.device(config.train.device).type == "cuda" else "gloo"
    size = config.train.num_ranks
    with _gloo_on_loopback():
        dist.init_process_group(
            backend, store=rendezvous, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
        )


def _build_sharded(config: RunConfig, store: OutputStore | None, checkpoint: Path | None) -> RankTrainer:
    return build_rank(
        config,
        store,
        checkpoint,
        shard=lambda model: shard_model(model, config.train.device, config.train.num_ranks),
        ranks=ProcessRanks(),
    )


def _child_main(setup: _ChildSetup, pipe: Connection) -> None:
    """A child's life: join, then follow rank 0 until the pipe closes.

    Its first error is reported and ends it.
    """
    store: OutputStore | None = None
    try:
        rendezvous = TCPStore(_LOOPBACK, setup.port, setup.config.train.num_ranks, is_master=False)
        _join_group(setup.config, rendezvous, setup.rank)
        if setup.store is not None:
            store = connect(setup.store)
        with quiet_transformers():
            rank = _build_sharded(setup.config, store, setup.checkpoint)
        pipe.send(None)
        while (message := _next_message(pipe)) is not None:
            _follow(rank, message)
            pipe.send(None)
    except BaseException:
        pipe.send(traceback.format_exc())
    finally:
        if store is not None:
            store.close()
        dist.destroy_process_group()


def _next_message(pipe: Connection) -> tuple | None:
    try:
        return pipe.recv()
    except EOFError:
        return None


def _follow(rank: RankTrainer, message: tuple) -> None:
    name, *arguments = message
    if name == "step":
        share, measure_without_replay = arguments
        rank.step([_decode(tasks) for tasks in share], measure_without_replay=measure_without_replay)
    elif name == "weights":
        for _ in rank.named_weights():
            pass
    else:
        assert name == "save", name
        rank.save(*arguments)


_EncodedTasks = tuple[bytes, list[float], list[float]]


def _encode(tasks: Sequence[SampleTask]) -> _EncodedTasks:
    return (
        encode_samples([task.sample for task in tasks]),
        [task.advantage for task in tasks],
        [task.loss_scale for task in tasks],
    )


def _decode(encoded: _EncodedTasks) -> list[SampleTask]:
    data, advantages, scales = encoded
    return [
        SampleTask(sample=sample, advantage=advantage, loss_scale=scale)
        for sample, advantage, scale in zip(decode_samples(data), advantages, scales, strict=True)
    ]
