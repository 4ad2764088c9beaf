"""The configured engines."""

import os
from collections.abc import Sequence

from radix_rl.config import RunConfig
from radix_rl.config.engine import EmbeddedEngineConfig, RemoteEngineConfig
from radix_rl.engines.base import Engine
from radix_rl.engines.pool import EnginePool
from radix_rl.errors import ConfigurationError
from radix_rl.launch.store import RunStore


def build_engine(config: RunConfig, run_store: RunStore | None) -> Engine:
    """The engine of a run, not started: one, or a pool over several. The caller starts and closes it.

    Raises ConfigurationError for a key that the environment does not hold.
    """
    settings = config.engine
    if isinstance(settings, EmbeddedEngineConfig):
        return _embedded(config, settings, run_store)
    engines = _remotes(settings, run_store)
    return engines[0] if len(engines) == 1 else EnginePool(engines)


def engines_of(engine: Engine) -> Sequence[Engine]:
    """Every engine that needs new weights."""
    return engine.engines if isinstance(engine, EnginePool) else (engine,)


def _embedded(config: RunConfig, settings: EmbeddedEngineConfig, run_store: RunStore | None) -> Engine:
    from radix_rl.engines.embedded.config import EmbeddedEngineConfig as EngineSettings
    from radix_rl.engines.embedded.config import OutputStoreTarget
    from radix_rl.engines.embedded.engine import EmbeddedEngine

    target = None
    if run_store is not None:
        target = OutputStoreTarget(backend=run_store.backend, config=run_store.config)
    return EmbeddedEngine(
        EngineSettings(
            model_path=str(config.model.path),
            dtype=settings.dtype,
            device=settings.device,
            max_running_requests=settings.max_running_requests,
            kv_cache_tokens=settings.kv_cache_tokens,
            context_length=settings.context_length,
            prefix_cache_tokens=settings.prefix_cache_tokens,
            enable_return_routed_experts=config.train.replay_routed_experts,
            enable_return_indexer_topk=config.train.replay_indexer_topk,
            output_store=target,
            num_threads=config.train.num_threads,
            seed=config.seed,
        )
    )


def _remotes(settings: RemoteEngineConfig, run_store: RunStore | None) -> list[Engine]:
    from radix_rl.engines.remote.engine import RemoteEngine, RemoteSettings

    remote = RemoteSettings(
        api_key=_key("engine.api_key_env", settings.api_key_env),
        admin_api_key=_key("engine.admin_api_key_env", settings.admin_api_key_env),
        connect_timeout_s=settings.connect_timeout_s,
        request_timeout_s=settings.request_timeout_s,
        start_timeout_s=settings.start_timeout_s,
    )
    needed = run_store.backend if run_store is not None else None
    store = run_store.store if run_store is not None else None
    return [RemoteEngine(url, remote, needs_output_store=needed, store=store) for url in settings.urls]


def _key(setting: str, variable: str | None) -> str | None:
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise ConfigurationError(f"{setting} names the environment variable {variable!r}, which is not set")
    return value
