"""`train`: builds a run from its configuration, runs it, and takes it down again, whatever happens."""

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoTokenizer

from radix_rl.config import RunConfig
from radix_rl.engines.base import Engine
from radix_rl.errors import ConfigurationError
from radix_rl.launch.checks import check_engine, check_launch
from radix_rl.launch.engines import build_engine, engines_of
from radix_rl.launch.store import RunStore, open_run_store
from radix_rl.rollout.environments.base import Environment
from radix_rl.rollout.environments.factory import create_environment
from radix_rl.rollout.generation import RolloutGenerator
from radix_rl.train.checkpoint import RunState, find_checkpoint, read_state
from radix_rl.train.interrupt import run_until_interrupted
from radix_rl.train.loop import Log, RunParts, Trainer, run_steps
from radix_rl.train.rank_trainer import build_rank
from radix_rl.weights.checkpoint_names import CheckpointNames
from radix_rl.weights.sync import WeightSynchronizer
from radix_rl.weights.transports.factory import create_transport

logger = logging.getLogger(__name__)


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    state: RunState
    objects_left: int
    """Stored fields below the run's key prefix; 0 without a store."""


def train(config: RunConfig, log: Log, environment: Environment | None = None) -> RunOutcome:
    """A whole run. `log` gets each step's metrics; `environment` takes the place of the configured one.

    Raises RadixError, OutputStoreError and, after a SIGINT, KeyboardInterrupt; whatever is raised, everything
    that was started has ended by then.
    """
    return run_until_interrupted(train_async(config, log, environment))


async def train_async(config: RunConfig, log: Log, environment: Environment | None = None) -> RunOutcome:
    check_launch(config)
    checkpoint = find_checkpoint(config.checkpoint.resume, config.output_dir / "checkpoints")
    state = read_state(checkpoint) if checkpoint else RunState(step=0, next_problem=0, optimizer_steps=0)
    async with AsyncExitStack() as stack:
        run_store = open_run_store(config)
        if run_store is not None:
            stack.callback(run_store.close)
        store = None if run_store is None else run_store.store
        tokenizer = load_tokenizer(config.model.path)
        if environment is None:
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
                lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
                config.rollout,
                seed=config.seed,
                replay=config.replayed_outputs,
                store=store,
                store_backend=None if run_store is None else run_store.backend,
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
        return RunOutcome(state=state, objects_left=0 if run_store is None else run_store.objects_left())


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
