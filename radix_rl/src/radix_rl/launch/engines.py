"""The configured engines."""

import os
from collections.abc import Sequence

from radix_rl.config import RunConfig
from radix_rl.config.engine import EmbeddedEngineConfig, RemoteEngineConfig
from radix_rl.engines.base import Engine
from radix_rl.engines.pool import EnginePool
from radix_rl.launch.store import RunStore


def build_engine(config: RunConfig, run_store: RunStore | None) -> Engine:
    """The engine of a run, not started: one, or a pool over several. The caller starts and closes it."""
    settings = config.engine
    if isinstance(settings, EmbeddedEngineConfig):
        return _embedded(config, settings, run_store)
    engines = _remotes(settings, run_store)
    return engines[0] if len(engines) == 1 else EnginePool(engines)


def engines_of(engine: Engine) -> Sequence[Engine]:
    """Every engine that needs new weights."""
    return engine.engines if isinstance(engine, EnginePool) else (engine,)


def _embedded(config: RunConfig, settings: EmbeddedEngineConfig, run_store: RunStore | None) -> Engine:
    from radix_rl.engines.embedded.config import EmbeddedEngineSetup
    from radix_rl.engines.embedded.engine import EmbeddedEngine

    return EmbeddedEngine(
        EmbeddedEngineSetup(
            **dict(settings),
            model_path=str(config.model.path),
            enable_return_routed_experts=config.train.replay_routed_experts,
            enable_return_indexer_topk=config.train.replay_indexer_topk,
            output_store=None if run_store is None else run_store.settings,
            num_threads=config.train.num_threads,
            seed=config.seed,
        )
    )


def _remotes(settings: RemoteEngineConfig, run_store: RunStore | None) -> list[Engine]:
    from radix_rl.engines.remote.engine import RemoteEngine

    api_key = _key(settings.api_key_env)
    admin_api_key = _key(settings.admin_api_key_env)
    return [
        RemoteEngine(
            url,
            settings,
            api_key=api_key,
            admin_api_key=admin_api_key,
            takes_over=True,
            needs_output_store=None if run_store is None else run_store.settings.backend,
            store=None if run_store is None else run_store.store,
        )
        for url in settings.urls
    ]


def _key(variable: str | None) -> str | None:
    """The launch checks saw that the environment holds it."""
    return None if variable is None else os.environ[variable]
