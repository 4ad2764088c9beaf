"""`train`: builds a run from its configuration, runs it, and takes it down again, whatever happens.

The command line does nothing besides; an environment of one's own is an argument.
"""

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoTokenizer

from radix_rl.buckets.checkpoint_names import CheckpointNames
from radix_rl.config import RunConfig
from radix_rl.engines.base import Engine
from radix_rl.errors import ConfigurationError
from radix_rl.launch.checks import check_engine, check_launch
from radix_rl.launch.engines import build_engine, engines_of
from radix_rl.launch.lock import locked
from radix_rl.launch.store import (
    RunStore,
    key_prefix_before,
    open_run_store,
    remove_left,
    with_key_prefix,
)
from radix_rl.observe.metrics import FILE_NAME as METRICS_FILE
from radix_rl.observe.metrics import read_metrics
from radix_rl.observe.observer import RunObserver
from radix_rl.observe.summary import read_summary
from radix_rl.rollout.environments.base import Environment
from radix_rl.rollout.environments.factory import create_environment
from radix_rl.rollout.generation import RolloutGenerator
from radix_rl.train.checkpoint import RunState, find_checkpoint, read_state
from radix_rl.train.interrupt import run_until_interrupted
from radix_rl.train.loop import Log, RunParts, Trainer, count_objects, run_steps
from radix_rl.train.rank_trainer import build_rank
from radix_rl.weights.sync import WeightSynchronizer
from radix_rl.weights.transports.factory import create_transport

logger = logging.getLogger(__name__)


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    state: RunState
    objects_left: int | None
    """Stored fields below the run's key prefix; 0 without a store, None if the store could not be asked."""
    summary: dict[str, Any]
    """What summary.json holds."""
    written: tuple[Path, ...]
    """summary.json and report.html, as far as they could be written."""


def train(
    config: RunConfig,
    log: Log | None = None,
    environment: Environment | None = None,
    *,
    show_progress: bool = True,
) -> RunOutcome:
    """Run a whole training: all that `radix-rl train` does, and all that it writes.

    `environment` takes the place of the configured one. `log` gets each step's metrics, after the trackers;
    what it raises ends the run. Progress goes to standard error.

    Raises RadixError, OutputStoreError and, after a SIGINT, KeyboardInterrupt; whatever is raised, everything
    that was started has ended by then.
    """
    if environment is None and config.environment is None:
        raise ConfigurationError(
            "environment: none is configured; add a section [environment], or pass one to train()"
        )
    refuse_a_run_that_is_there(config)
    check_launch(config)
    with locked(config.output_dir):
        return _train(config, log, environment, show_progress)


def _train(
    config: RunConfig, log: Log | None, environment: Environment | None, show_progress: bool
) -> RunOutcome:
    """A run that holds its output directory."""
    prefix_before = key_prefix_before(config.output_dir)
    config = with_key_prefix(config)
    prefix = config.output_store.key_prefix
    checkpoint = find_checkpoint(config.checkpoint.resume, config.output_dir / "checkpoints")
    state = read_state(checkpoint) if checkpoint else RunState(step=0, next_problem=0, optimizer_steps=0)
    if checkpoint is not None and state.step >= config.train.steps:
        logger.warning(
            "nothing to do: %s is at step %d of train.steps = %d; raise train.steps to go on",
            checkpoint,
            state.step,
            config.train.steps,
        )
        return finished_before(config, state)
    with RunObserver(config, first_step=state.step, show_progress=show_progress) as observer:

        def log_step(step: int, metrics: dict[str, float]) -> None:
            observer.log(step, metrics)
            if log is not None:
                log(step, metrics)

        main = build_and_run(
            config,
            log_step,
            environment,
            checkpoint,
            state,
            is_left_by_a_run=prefix is not None and prefix == prefix_before,
        )
        state, objects_left = run_until_interrupted(main)
    summary, written = observer.finish(objects_left)
    return RunOutcome(state=state, objects_left=objects_left, summary=summary, written=written)


def finished_before(config: RunConfig, state: RunState) -> RunOutcome:
    """The outcome of a run that has no steps left; nothing is written."""
    summary = read_summary(config.output_dir)
    return RunOutcome(state=state, objects_left=summary.get("objects_left"), summary=summary, written=())


def refuse_a_run_that_is_there(config: RunConfig) -> None:
    """Raise ConfigurationError for an output directory with a step or a checkpoint to lose.

    A run that failed before its first step leaves neither.
    """
    if config.checkpoint.resume != "never":
        return
    metrics = config.output_dir / METRICS_FILE
    # The evaluation before the first step has the number 0.
    has_steps = metrics.is_file() and any(record["step"] > 0 for record in read_metrics(metrics))
    if has_steps or find_checkpoint("latest", config.output_dir / "checkpoints") is not None:
        raise ConfigurationError(
            f"output_dir: {str(config.output_dir)!r} holds a run already; name another directory, remove it, "
            "or go on with it by checkpoint.resume=latest"
        )


async def build_and_run(
    config: RunConfig,
    log: Log,
    environment: Environment | None,
    checkpoint: Path | None,
    state: RunState,
    *,
    is_left_by_a_run: bool = False,
) -> tuple[RunState, int | None]:
    """The steps after `state`, which is the checkpoint's; the state after the last and the objects left.

    `is_left_by_a_run`: what lies below the key prefix was left by an earlier run, and is removed.
    """
    async with AsyncExitStack() as stack:
        run_store = open_run_store(config)
        if run_store is not None:
            stack.callback(run_store.close)
            if is_left_by_a_run:
                await asyncio.to_thread(remove_left, run_store)
        store = None if run_store is None else run_store.store
        tokenizer = load_tokenizer(config.model.path)
        if environment is None:
            assert config.environment is not None, "checked by train()"
            environment = create_environment(config.environment, tokenizer, seed=config.seed)
        trainer = await asyncio.to_thread(build_trainer, config, run_store, checkpoint)
        stack.callback(trainer.close)
        engine = build_engine(config, run_store)
        stack.push_async_callback(engine.close)
        await engine.start()
        check_engine(config, engine)
        parts = RunParts(
            config=config,
            environment=environment,
            generator=RolloutGenerator(
                engine,
                environment,
                tokenizer.decode,
                config.rollout,
                seed=config.seed,
                replay=config.replayed_outputs,
                store=store,
                store_backend=None if run_store is None else run_store.settings.backend,
            ),
            trainer=trainer,
            synchronizer=build_synchronizer(config, engine),
            run_store=run_store,
            log=log,
        )
        stack.push_async_callback(parts.synchronizer.close)
        # The engine may hold anything: other weights, a later version of another run, the checkpoint before
        # this one.
        await parts.synchronizer.sync(state.step, trainer.named_weights())
        state = await run_steps(parts, state)
        return state, await count_objects(parts)


def build_synchronizer(config: RunConfig, engine: Engine) -> WeightSynchronizer:
    """For started engines, by the configured transport. Raises ConfigurationError."""
    transport = create_transport(
        config.weights,
        directory=config.output_dir / "weights",
        model_path=config.model.path,
        device=config.train.device,
    )
    return WeightSynchronizer(
        engines_of(engine),
        transport,
        bucket_bytes=config.weights.bucket_bytes,
        checkpoint_names=CheckpointNames(config.model.path),
    )


def build_trainer(config: RunConfig, run_store: RunStore | None, checkpoint: Path | None) -> Trainer:
    """The ranks that `train.num_ranks` asks for, with the model of the checkpoint if there is one."""
    if config.train.num_ranks > 1:
        from radix_rl.train.distributed import DistributedTrainer

        return DistributedTrainer(config, run_store, checkpoint)
    return build_rank(config, None if run_store is None else run_store.store, checkpoint)


def load_tokenizer(path: Path) -> Any:
    """Raises ConfigurationError for a folder without one."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model.path: {str(path)!r} holds no tokenizer: {error}") from error
