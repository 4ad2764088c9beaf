"""`RankTrainer`: one rank of the trainer from references to updated weights."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from radix_rl.config import RunConfig
from radix_rl.openmp_pool import pool_ended_after
from radix_rl.train.batch import TrainSample, make_train_sample
from radix_rl.train.checkpoint import RunState, restore_worker, save_checkpoint, try_saving
from radix_rl.train.collectives import Ranks
from radix_rl.train.plan.step_plan import SampleTask
from radix_rl.train.policy import load_policy, load_reference
from radix_rl.train.replay.assemble import assemble_replay
from radix_rl.train.worker import PolicyWorker
from radix_rl.weights.sync import named_weights
from radix_transfer_plugins import OutputStore

_FIELDS = {
    "routed_experts": ("routed_experts",),
    "indexer_topk": ("indexer_topk",),
    "sampling_mask": ("sampling_mask_lengths", "sampling_mask_token_ids"),
}
"""Replay output -> the stored fields that the trainer needs of it."""


class RankTrainer:
    """Reads the replay outputs of its own samples, once each, and trains on them. Does not delete them."""

    def __init__(
        self,
        config: RunConfig,
        worker: PolicyWorker,
        store: OutputStore | None,
        checkpoint: Path | None = None,
    ) -> None:
        """`store` stays the caller's.

        With `checkpoint` the optimizer goes on where that one ended; the worker's model must be the
        checkpoint's.
        """
        self._config = config
        self.worker = worker
        self._store = store
        if checkpoint is not None:
            restore_worker(checkpoint, worker)

    @pool_ended_after()
    def step(
        self, minibatches: Sequence[Sequence[SampleTask]], *, measure_without_replay: bool = False
    ) -> dict[str, float]:
        """Metrics over all ranks. Raises ReplayError, TrainingError, the store's errors."""
        started = time.perf_counter()
        loaded = self._load(minibatches)
        read = time.perf_counter()
        metrics = self.worker.train_step(loaded, measure_without_replay=measure_without_replay)
        return metrics | {"time/read_s": read - started, "time/train_s": time.perf_counter() - read}

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors by name, one at a time. With several ranks all of them iterate to the end."""
        for name, tensor in named_weights(self.worker.model):
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @pool_ended_after()
    def save(self, state: RunState) -> Path:
        config = self._config
        return save_checkpoint(
            config.output_dir / "checkpoints",
            self.worker,
            state,
            keep=config.checkpoint.keep,
            tokenizer_from=config.model.path,
        )

    @property
    def optimizer_steps(self) -> int:
        return self.worker.optimizer_steps

    def close(self) -> None:
        """Nothing to end: the rank runs in its caller's process."""

    def _load(self, minibatches: Sequence[Sequence[SampleTask]]) -> list[list[TrainSample]]:
        tasks = [task for minibatch in minibatches for task in minibatch]
        rows = iter(self._replay_rows(tasks))
        return [
            [
                make_train_sample(
                    task.sample,
                    advantage=task.advantage,
                    loss_scale=task.loss_scale,
                    replay=next(rows),
                )
                for task in minibatch
            ]
            for minibatch in minibatches
        ]

    def _replay_rows(self, tasks: Sequence[SampleTask]) -> list[dict]:
        fields = [field for output in self._config.replayed_outputs for field in _FIELDS[output]]
        if not fields:
            return [{} for _ in tasks]
        return assemble_replay(
            [task.sample for task in tasks],
            self._store,
            fields,
            self._config.output_store.read_buffer_bytes,
            narrow=True,
        )


@pool_ended_after()
def build_rank(
    config: RunConfig,
    store: OutputStore | None,
    checkpoint: Path | None,
    *,
    shard: Callable[[PreTrainedModel], None] = lambda model: None,
    ranks: Ranks | None = None,
) -> RankTrainer:
    """A rank with the model of the checkpoint, or of `model.path`.

    `shard` spreads a loaded model over the ranks.
    """
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    model = load_policy(checkpoint / "model" if checkpoint else config.model.path, config.model, config.train)
    if ranks is None or ranks.index == 0:
        try_saving(model, config.output_dir, files_from=config.model.path)
    shard(model)
    reference = None
    if config.algorithm.kl_coefficient > 0:
        reference = load_reference(config.model, config.train)
        shard(reference)
    return RankTrainer(
        config, PolicyWorker(config, model, reference=reference, ranks=ranks), store, checkpoint
    )
