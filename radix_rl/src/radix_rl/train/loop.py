"""The synchronous loop: generate, score, advantages, train, sync."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from radix_rl.concurrency import in_thread_to_end
from radix_rl.config import RunConfig
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


async def run_steps(parts: RunParts, state: RunState) -> RunState:
    """Steps from `state` to the configured number of them; the state after the last.

    The stored objects of a step are deleted when the step has trained on them, and when it raises.
    """
    config = parts.config
    first_step = state.step
    if _is_due(config.eval.every_steps, 0) and first_step == 0:
        parts.log(0, await evaluate(parts))
    while state.step < config.train.steps:
        state, metrics = await run_step(parts, state)
        is_last = state.step == config.train.steps
        if _is_due(config.eval.every_steps, state.step, is_last):
            metrics |= await evaluate(parts)
        if is_last or (config.checkpoint.every_steps and state.step % config.checkpoint.every_steps == 0):
            with _timed(metrics, "checkpoint"):
                await asyncio.to_thread(parts.trainer.save, state)
        parts.log(state.step, metrics)
    return state


async def run_step(parts: RunParts, state: RunState) -> tuple[RunState, dict[str, float]]:
    """One step; the state after it and its metrics."""
    config, metrics = parts.config, {}
    step = state.step
    samples: list[Sample] = []
    try:
        with _timed(metrics, "generate"):
            rollout = await collect_samples(parts, state, samples)
        metrics |= rollout_metrics(samples)
        metrics["rollout/equal_groups_share"] = rollout.equal_groups / rollout.groups
        metrics["rollout/failed_rewards"] = float(rollout.failed_rewards)
        metrics["rollout/tokens_per_second"] = rollout.response_tokens / metrics["time/generate_s"]
        plan = plan_step(config, samples, step)
        parts.no_signal.after_plan(step + 1, plan)
        with _timed(metrics, "step"):
            metrics |= await asyncio.to_thread(
                parts.trainer.step,
                plan,
                measure_without_replay=_is_due(config.train.gap_without_replay_every_steps, step),
            )
    finally:
        if parts.run_store is not None:
            await in_thread_to_end(delete_refs, samples, parts.run_store.store)
    with _timed(metrics, "sync"):
        metrics |= await parts.synchronizer.sync(step + 1, parts.trainer.named_weights())
    if parts.run_store is not None and (left := await count_objects(parts)) is not None:
        metrics["store/objects"] = float(left)
    tokens = sum(len(sample.tokens) for sample in samples)
    metrics["train/tokens_per_second"] = tokens / metrics["time/train_s"]
    after = RunState(
        step=step + 1, next_problem=rollout.next_problem, optimizer_steps=parts.trainer.optimizer_steps
    )
    return after, metrics


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
