"""`PolicyWorker`: one rank's policy and optimizer, which turn samples into optimizer steps."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from radix_rl.config import RunConfig
from radix_rl.errors import TrainingError
from radix_rl.train.batch import TrainBatch, TrainSample, collate, split_microbatches
from radix_rl.train.collectives import Ranks
from radix_rl.train.objective.correction import correction_weights
from radix_rl.train.objective.kl import kl_to_reference
from radix_rl.train.objective.logprobs import response_logprobs
from radix_rl.train.objective.losses.registry import policy_loss
from radix_rl.train.objective.mismatch import MismatchSums
from radix_rl.train.replay.counts import ReplayCounts
from radix_rl.train.replay.experts import RouterReplay
from radix_rl.train.replay.hooked import HookedReplay
from radix_rl.train.replay.indexers import IndexerReplay
from radix_rl.train.replay.unrecorded import check_unrecorded
from radix_rl.train.schedule import learning_rate


@dataclass
class _StepSums:
    """What one rank adds up over a step."""

    mismatch: MismatchSums = field(default_factory=MismatchSums)
    """Of the policy before the step's first update."""
    replay: ReplayCounts = field(default_factory=ReplayCounts)
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    largest_ratio: float = 0.0
    smallest_ratio: float = float("inf")


class PolicyWorker:
    """The same code for one rank and for many: with many, `model` is sharded and `ranks` adds up.

    Every method is called on every rank, in the same order. One thread.
    """

    def __init__(
        self,
        config: RunConfig,
        model: PreTrainedModel,
        *,
        reference: PreTrainedModel | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`reference`: the frozen initial model, needed if and only if there is a KL penalty."""
        assert (reference is not None) == (config.algorithm.kl_coefficient > 0)
        self.config = config
        self.model = model
        self.ranks = ranks or Ranks()
        self._reference = reference
        optimizer = config.optimizer
        self.optimizer = torch.optim.AdamW(
            (parameter for parameter in model.parameters() if parameter.requires_grad),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        self.optimizer_steps = 0
        """Taken so far; the schedule depends on it."""
        self._device = torch.device(config.train.device)
        self._replays: list[HookedReplay] = []
        if config.train.replay_routed_experts:
            self._replays.append(RouterReplay(model))
        if config.train.replay_indexer_topk:
            self._replays.append(IndexerReplay(model))

    def train_step(
        self, minibatches: Sequence[Sequence[TrainSample]], *, measure_without_replay: bool = False
    ) -> dict[str, float]:
        """One optimizer step for each minibatch.

        `minibatches[i]` are this rank's samples of minibatch i, at least one.

        The policy before the step is what the first forward pass sees: with one minibatch its
        log-probabilities come from that pass, with more from a pass of their own. Returns the step's metrics
        over all ranks, the same on every rank.
        """
        step = _StepSums()
        samples = [sample for minibatch in minibatches for sample in minibatch]
        check_unrecorded(samples, self.config.train.max_unrecorded_share, self.ranks)
        metrics: dict[str, float] = {}
        if measure_without_replay and self._replays_anything:
            metrics |= self._mismatch_metrics(self._measure_mismatch(samples), "without_replay")
        old: dict[int, torch.Tensor] | None = None
        if len(minibatches) > 1:
            old = self._logprobs_by_sample(samples, step)
        reference = self._reference_logprobs(samples)
        norms = []
        for minibatch in minibatches:
            norms.append(self._minibatch(minibatch, old, reference, step))
        metrics |= self._mismatch_metrics(
            step.mismatch, "with_replay" if self._replays_anything else "without_replay"
        )
        metrics |= self._loss_metrics(step, len(minibatches))
        metrics |= self._replay_metrics(step.replay)
        metrics["train/grad_norm"] = sum(norms) / len(norms)
        return metrics

    def logprobs(self, samples: Sequence[TrainSample], *, replay: bool) -> list[torch.Tensor]:
        """Log-probabilities under the present policy, without gradients.

        One `[C]` float32 CPU tensor a sample, 0 where loss_mask is 0.
        """
        found: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for group, batch in self._microbatches(samples):
                with self._routing(batch, ReplayCounts(), replay) as forward_finished:
                    values = response_logprobs(
                        self.model, batch, self.config.rollout.sampling, replay_mask=replay
                    )
                    forward_finished()
                found |= _split(group, values)
        return [found[id(sample)][sample.num_tokens - sample.num_response_tokens :] for sample in samples]

    def _minibatch(
        self,
        samples: Sequence[TrainSample],
        old: dict[int, torch.Tensor] | None,
        reference: dict[int, torch.Tensor] | None,
        step: _StepSums,
    ) -> float:
        """Accumulate gradients and update; the gradient's norm before clipping."""
        rate = learning_rate(self.config.optimizer, self.optimizer_steps, self._total_optimizer_steps())
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        for group, batch in self._microbatches(samples):
            self._microbatch(group, batch, old, reference, step)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        norm_value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not torch.isfinite(torch.tensor(norm_value)):
            raise TrainingError(
                f"the gradient of optimizer step {self.optimizer_steps} is {norm_value}; the weights were "
                "not changed"
            )
        self.optimizer.step()
        self.optimizer_steps += 1
        step.sums["lr"] = rate
        return norm_value

    def _microbatch(
        self,
        group: Sequence[TrainSample],
        batch: TrainBatch,
        old: dict[int, torch.Tensor] | None,
        reference: dict[int, torch.Tensor] | None,
        step: _StepSums,
    ) -> None:
        algorithm = self.config.algorithm
        mask = batch.loss_mask_bt
        # With old values from a pass of their own, that pass has counted replay and mismatch already.
        counts = step.replay if old is None else ReplayCounts()
        with self._routing(batch, counts, replay=True) as forward_finished:
            logprobs = response_logprobs(self.model, batch, self.config.rollout.sampling)
            forward_finished()
            before = logprobs.detach() if old is None else _join(group, old, batch)
            if old is None:
                step.mismatch.add(before, batch.rollout_logprobs_bt, mask)
            base = before if algorithm.old_logprobs == "recomputed" else batch.rollout_logprobs_bt
            losses = policy_loss(algorithm.loss, logprobs, base, batch.advantages_bt, mask)
            weights = correction_weights(algorithm.correction, before, batch.rollout_logprobs_bt, mask)
            token_loss = losses.loss_bt * weights
            if reference is not None:
                penalty = kl_to_reference(logprobs, _join(group, reference, batch))
                token_loss = token_loss + algorithm.kl_coefficient * penalty
                step.sums["kl_reference"] += float((penalty.detach() * mask).sum())
            loss = (token_loss * batch.loss_scale_bt).sum()
            # FSDP averages gradients over ranks; the scales already divide by the tokens of all ranks.
            (loss * self.ranks.size).backward()
        step.sums["loss"] += float(loss.detach())
        step.sums["tokens"] += float(mask.sum())
        step.sums["ratio"] += float((losses.ratio_bt * mask).sum())
        step.sums["clipped"] += float((losses.clipped_bt * mask).sum())
        step.sums["weight"] += float((weights * mask).sum())
        ratios = losses.ratio_bt[mask > 0]
        if ratios.numel():
            step.largest_ratio = max(step.largest_ratio, float(ratios.max()))
            step.smallest_ratio = min(step.smallest_ratio, float(ratios.min()))

    def _microbatches(self, samples: Sequence[TrainSample]) -> Iterator[tuple[list[TrainSample], TrainBatch]]:
        """Groups of samples with their padded tensors.

        As many on every rank, since sharded models run in step.
        """
        groups = [
            [samples[position] for position in positions]
            for positions in split_microbatches(samples, self.config.train.microbatch_tokens)
        ]
        # Before the first forward pass: a rank with fewer groups would ask while others gather parameters.
        needed = int(self.ranks.max({"groups": float(len(groups))})["groups"])
        for group in groups:
            yield group, collate(group, self._device)
        for _ in range(needed - len(groups)):
            batch = collate(groups[-1][:1], self._device)
            # A sample of one token: none of its rows counts as replayed.
            batch.lengths_b.fill_(1)
            batch.loss_mask_bt.zero_()
            batch.loss_scale_bt.zero_()
            yield [], batch

    @contextmanager
    def _routing(self, batch: TrainBatch, counts: ReplayCounts, replay: bool) -> Iterator[Callable[[], None]]:
        """Replay by hooks for the block, if it is on; yields what to call after the forward pass."""
        with ExitStack() as stack:
            bound = [stack.enter_context(one.microbatch(batch, counts)) for one in self._replays if replay]

            def forward_finished() -> None:
                for one in bound:
                    one.forward_finished()

            yield forward_finished

    def _logprobs_by_sample(self, samples: Sequence[TrainSample], step: _StepSums) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for group, batch in self._microbatches(samples):
                with self._routing(batch, step.replay, replay=True) as forward_finished:
                    values = response_logprobs(self.model, batch, self.config.rollout.sampling)
                    forward_finished()
                step.mismatch.add(values, batch.rollout_logprobs_bt, batch.loss_mask_bt)
                found |= _split(group, values)
        return found

    def _measure_mismatch(self, samples: Sequence[TrainSample]) -> MismatchSums:
        """One more forward pass, in which the model makes its own choices."""
        mismatch = MismatchSums()
        with torch.no_grad():
            for _, batch in self._microbatches(samples):
                values = response_logprobs(self.model, batch, self.config.rollout.sampling, replay_mask=False)
                mismatch.add(values, batch.rollout_logprobs_bt, batch.loss_mask_bt)
        return mismatch

    def _reference_logprobs(self, samples: Sequence[TrainSample]) -> dict[int, torch.Tensor] | None:
        if self._reference is None:
            return None
        found: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for group, batch in self._microbatches(samples):
                found |= _split(
                    group, response_logprobs(self._reference, batch, self.config.rollout.sampling)
                )
        return found

    def _total_optimizer_steps(self) -> int:
        return self.config.train.steps * self.config.train.minibatches

    def _mismatch_metrics(self, mismatch: MismatchSums, kind: str) -> dict[str, float]:
        sums = self.ranks.sum({"tokens": mismatch.tokens, "absolute": mismatch.absolute, "k3": mismatch.k3})
        largest = self.ranks.max({"largest": mismatch.largest, "ratio": mismatch.largest_ratio_deviation})
        tokens = max(sums["tokens"], 1.0)
        return {
            f"mismatch/mean_abs_{kind}": sums["absolute"] / tokens,
            f"mismatch/k3_{kind}": sums["k3"] / tokens,
            f"mismatch/max_abs_{kind}": largest["largest"],
            f"mismatch/max_ratio_deviation_{kind}": largest["ratio"],
        }

    def _loss_metrics(self, step: _StepSums, num_minibatches: int) -> dict[str, float]:
        rate = step.sums.pop("lr")
        names = ("loss", "tokens", "ratio", "clipped", "weight", "kl_reference")
        sums = self.ranks.sum({name: step.sums[name] for name in names})
        extremes = self.ranks.max({"largest": step.largest_ratio, "smallest": -step.smallest_ratio})
        tokens = max(sums["tokens"], 1.0)
        metrics = {
            "train/loss": sums["loss"] / num_minibatches,
            "train/lr": rate,
            "train/tokens": sums["tokens"],
            "train/ratio_mean": sums["ratio"] / tokens,
            "train/clip_fraction": sums["clipped"] / tokens,
            "train/correction_weight_mean": sums["weight"] / tokens,
        }
        if sums["tokens"]:
            metrics |= {"train/ratio_max": extremes["largest"], "train/ratio_min": -extremes["smallest"]}
        if self._reference is not None:
            metrics["train/kl_reference"] = sums["kl_reference"] / tokens
        return metrics

    def _replay_metrics(self, counts: ReplayCounts) -> dict[str, float]:
        sums = self.ranks.sum({name: float(value) for name, value in vars(counts).items()})
        metrics: dict[str, float] = {}
        if self.config.train.replay_routed_experts:
            metrics["replay/router_disagreement"] = sums["disagreeing"] / max(sums["token_layers"], 1.0)
            metrics["replay/unrecorded_share"] = sums["unrecorded_rows"] / max(sums["rows"], 1.0)
        if self.config.train.replay_indexer_topk:
            token_layers = max(sums["indexer_token_layers"], 1.0)
            metrics["replay/indexer_disagreement"] = sums["indexer_disagreeing"] / token_layers
        return metrics

    @property
    def _replays_anything(self) -> bool:
        return bool(self.config.replayed_outputs)


def _split(group: Sequence[TrainSample], values_bt: torch.Tensor) -> dict[int, torch.Tensor]:
    """Identity of each sample -> its `[N]` values, on the CPU."""
    return {id(sample): values_bt[row, : sample.num_tokens].cpu() for row, sample in enumerate(group)}


def _join(group: Sequence[TrainSample], values: dict[int, torch.Tensor], batch: TrainBatch) -> torch.Tensor:
    """`[b, t]` of the samples' stored values, 0 in the padding."""
    joined = torch.zeros_like(batch.rollout_logprobs_bt)
    for row, sample in enumerate(group):
        joined[row, : sample.num_tokens] = values[id(sample)]
    return joined
