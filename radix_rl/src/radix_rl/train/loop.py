"""The synchronous loop: generate, score, advantages, train, sync."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from radix_rl.concurrency import in_thread_to_end, to_end
from radix_rl.config import RunConfig
from radix_rl.errors import CheckpointError
from radix_rl.launch.store import RunStore
from radix_rl.observe.tolerance import Tolerance
from radix_rl.rollout.environments.base import Environment
from radix_rl.rollout.generation import RolloutGenerator
from radix_rl.rollout.metrics import equal_groups, rollout_metrics
from radix_rl.rollout.refs import delete_refs
from radix_rl.rollout.sample import Sample
from radix_rl.rollout.scoring import num_failed
from radix_rl.train.checkpoint import RunState
from radix_rl.train.plan.no_signal import NoSignalWarning
from radix_rl.train.plan.step_plan import SampleTask, plan_step
from radix_rl.weights.sync import WeightSynchronizer

logger = logging.getLogger(__name__)

Log = Callable[[int, dict[str, float]], None]
"""Takes the number of steps done and the metrics of the last one."""


class Trainer(Protocol):
    """What the loop needs of a trainer, whatever the number of its ranks.

    Called from one thread at a time.
    """

    @property
    def optimizer_steps(self) -> int: ...

    def step(
        self, minibatches: Sequence[Sequence[SampleTask]], *, measure_without_replay: bool = False
    ) -> dict[str, float]: ...

    def named_weights(self) -> Iterator: ...

    def save(self, state: RunState) -> object: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class RunParts:
    """Everything a run works with, started and ready; owned by who built it."""

    config: RunConfig
    environment: Environment
    generator: RolloutGenerator
    trainer: Trainer
    synchronizer: WeightSynchronizer
    run_store: RunStore | None
    log: Log
    no_signal: NoSignalWarning = field(default_factory=NoSignalWarning)
    tolerance: Tolerance = field(default_factory=Tolerance)


@dataclass
class Position:
    """Where a run is."""

    state: RunState
    """After the last step that trained."""
    saved_step: int
    """Step of the newest checkpoint."""
    unlogged: dict[str, float] | None = None
    """Metrics of the step that `state` follows, until they are logged."""
    can_save: bool = True
    """False while the trainer works, and after it failed: its weights may lie between two steps."""


async def run_steps(parts: RunParts, state: RunState) -> RunState:
    """Steps from `state` to the configured number of them; the state after the last.

    The stored objects of a step are deleted when the step has trained on them, and when it raises. A
    cancellation saves what has trained if `checkpoint.save_on_interrupt` is set. A checkpoint that the disk
    does not take is a warning; if it is the last one, CheckpointError is raised.
    """
    at = Position(state, saved_step=state.step)
    try:
        await _run_steps(parts, at)
    except asyncio.CancelledError:
        if parts.config.checkpoint.save_on_interrupt:
            await save_interrupted(parts, at)
        raise
    return at.state


async def _run_steps(parts: RunParts, at: Position) -> None:
    config = parts.config
    if _is_due(config.eval.every_steps, 0) and at.state.step == 0:
        parts.log(0, await evaluate(parts))
    while at.state.step < config.train.steps:
        metrics = await run_step(parts, at)
        step = at.state.step
        is_last = step == config.train.steps
        if _is_due(config.eval.every_steps, step, is_last):
            metrics |= await evaluate(parts)
        refused = None
        if is_last or (config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0):
            with _timed(metrics, "checkpoint"):
                refused = await to_end(save(parts, at))
        at.unlogged = None
        parts.log(step, metrics)
        if refused is not None:
            if is_last:
                raise refused
            logger.warning("%s; the run goes on", refused)


async def run_step(parts: RunParts, at: Position) -> dict[str, float]:
    """One step, after which `at` is; its metrics."""
    config, metrics = parts.config, {}
    step = at.state.step
    samples: list[Sample] = []
    try:
        with _timed(metrics, "generate"):
            rollout = await collect_samples(parts, at.state, samples)
        metrics |= rollout_metrics(samples)
        metrics["rollout/equal_groups_share"] = rollout.equal_groups / rollout.groups
        metrics["rollout/failed_rewards"] = float(rollout.failed_rewards)
        metrics["rollout/tokens_per_second"] = rollout.response_tokens / metrics["time/generate_s"]
        plan = plan_step(config, samples, step)
        parts.no_signal.after_plan(step + 1, plan)
        await _unbroken(parts, train_on(parts, at, plan, rollout, metrics))
    finally:
        if parts.run_store is not None:
            await in_thread_to_end(delete_refs, samples, parts.run_store.store)
    await _unbroken(parts, sync(parts, at, metrics))
    if parts.run_store is not None and (left := await count_objects(parts)) is not None:
        metrics["store/objects"] = float(left)
    tokens = sum(len(sample.tokens) for sample in samples)
    metrics["train/tokens_per_second"] = tokens / metrics["time/train_s"]
    return metrics


async def train_on(
    parts: RunParts,
    at: Position,
    plan: Sequence[Sequence[SampleTask]],
    rollout: "Rollout",
    metrics: dict[str, float],
) -> None:
    """Train a step's plan: `at` moves, `metrics` grow."""
    step = at.state.step
    at.can_save = False
    with _timed(metrics, "step"):
        metrics |= await asyncio.to_thread(
            parts.trainer.step,
            plan,
            measure_without_replay=_is_due(parts.config.train.mismatch_without_replay_every_steps, step),
        )
    at.state = RunState(
        step=step + 1, next_problem=rollout.next_problem, optimizer_steps=parts.trainer.optimizer_steps
    )
    at.unlogged = metrics
    at.can_save = True


async def sync(parts: RunParts, at: Position, metrics: dict[str, float]) -> None:
    """Send the trained weights to the engines."""
    at.can_save = False
    with _timed(metrics, "sync"):
        metrics |= await parts.synchronizer.sync(at.state.step, parts.trainer.named_weights())
    at.can_save = True


async def _unbroken(parts: RunParts, work: Coroutine[Any, Any, None]) -> None:
    """Run what uses the trainer: to its end where an interrupt is to save."""
    await (to_end(work) if parts.config.checkpoint.save_on_interrupt else work)


async def save(parts: RunParts, at: Position) -> CheckpointError | None:
    """Write a checkpoint of where the run is; the error if the disk did not take it."""
    at.can_save = False
    refused = None
    try:
        await asyncio.to_thread(parts.trainer.save, at.state)
        at.saved_step = at.state.step
    except CheckpointError as error:
        refused = error
    at.can_save = True
    return refused


async def save_interrupted(parts: RunParts, at: Position) -> None:
    """Write the checkpoint and the metrics that an interrupted run has and that are not on disk yet."""
    if not at.can_save:
        logger.warning("no checkpoint is saved at this interrupt: the trainer failed within a step")
        return
    if at.state.step > at.saved_step and (refused := await to_end(save(parts, at))) is not None:
        logger.warning("%s", refused)
    if at.unlogged is not None:
        parts.log(at.state.step, at.unlogged)


async def count_objects(parts: RunParts) -> int | None:
    """Stored fields of this run; 0 without a store, None if the store could not be asked."""
    if parts.run_store is None:
        return 0
    with parts.tolerance.of("counting the stored objects"):
        return await asyncio.to_thread(parts.run_store.objects_left)
    return None


@dataclass
class Rollout:
    """What a step generated, dropped groups included."""

    next_problem: int
    """Index of the first problem that was not used."""
    groups: int = 0
    equal_groups: int = 0
    """Groups whose rewards are all equal."""
    failed_rewards: int = 0
    response_tokens: int = 0


async def collect_samples(parts: RunParts, state: RunState, samples: list[Sample]) -> Rollout:
    """Fill `samples` with a step's groups.

    With dynamic sampling, groups whose rewards are all equal are dropped, their objects deleted, and
    replaced by groups of further problems; after the last round a step without any other group trains on the
    equal ones, and changes nothing.
    """
    rollout, done = parts.config.rollout, Rollout(next_problem=state.next_problem)
    num_groups = 0
    rounds = rollout.dynamic_sampling.max_rounds if rollout.dynamic_sampling.enabled else 1
    for round_number in range(rounds):
        wanted = rollout.prompts_per_step - num_groups
        problems = [parts.environment.train_problem(done.next_problem + offset) for offset in range(wanted)]
        done.next_problem += wanted
        generated = await parts.generator.generate(
            state.step, problems, first_group_id=round_number * rollout.prompts_per_step
        )
        equal = equal_groups(generated)
        done.groups += wanted
        done.equal_groups += len(equal)
        done.failed_rewards += num_failed(generated)
        done.response_tokens += sum(len(sample.tokens) - sample.prompt_tokens for sample in generated)
        keep = generated
        if rollout.dynamic_sampling.enabled:
            keep = [sample for sample in generated if sample.group_id not in equal]
            is_final_and_empty = round_number == rounds - 1 and not samples and not keep
            keep = generated if is_final_and_empty else keep
            kept = {id(sample) for sample in keep}
            dropped = [sample for sample in generated if id(sample) not in kept]
            if parts.run_store is not None:
                # Owned by the step from here on: its `finally` deletes them even if this deletion fails.
                samples += dropped
                await in_thread_to_end(delete_refs, dropped, parts.run_store.store)
                del samples[len(samples) - len(dropped) :]
        samples += keep
        num_groups = len({sample.group_id for sample in samples})
        if num_groups == rollout.prompts_per_step:
            break
    return done


async def evaluate(parts: RunParts) -> dict[str, float]:
    """Accuracy on the held-out problems; asks for no replay outputs."""
    settings = parts.config.eval
    problems = parts.environment.eval_problems()[: settings.num_problems]
    started = time.perf_counter()
    samples = await parts.generator.evaluate(problems, settings.sampling)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    lengths = [len(sample.tokens) - sample.prompt_tokens for sample in samples]
    return {
        "eval/accuracy": float(np.mean(rewards)),
        "eval/response_tokens_mean": float(np.mean(lengths)),
        "eval/problems": float(len(problems)),
        "eval/failed_rewards": float(num_failed(samples)),
        "time/eval_s": time.perf_counter() - started,
    }


def _is_due(every_steps: int, step: int, is_last: bool = False) -> bool:
    return every_steps > 0 and (is_last or step % every_steps == 0)


@contextmanager
def _timed(metrics: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    metrics[f"time/{phase}_s"] = time.perf_counter() - started
