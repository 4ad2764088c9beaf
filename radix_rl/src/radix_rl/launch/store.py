"""The run's client of the output store."""

import logging
import re
import secrets
import time
from pathlib import Path

import msgspec

from radix_rl.config import RunConfig, load_config
from radix_rl.config.output_store import OutputStoreConfig
from radix_rl.config.saving import FILE_NAME as CONFIG_FILE
from radix_rl.errors import ConfigurationError
from radix_transfer_plugins import OutputStore, create_backend

logger = logging.getLogger(__name__)

_NO_KEY_CHARACTER = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 100
"""A key prefix may have 256 characters."""


class RunStore(msgspec.Struct, frozen=True, eq=False):
    """The trainer's client, and what an engine needs to write where this client reads.

    Owned by who opened it.
    """

    settings: OutputStoreConfig
    """The configured ones, with the key prefix that this run has."""
    store: OutputStore

    def objects_left(self) -> int:
        """Stored fields below the run's prefix; 0 after every step whose references were deleted."""
        return sum(1 for _ in self.store.list_objects())

    def close(self) -> None:
        self.store.close()


def open_run_store(config: RunConfig) -> RunStore | None:
    """Connect, with the key prefix of `with_key_prefix`.

    None when replay outputs travel inline or are not asked for. Raises the store's ConfigError and
    StoreUnavailableError.
    """
    settings = with_key_prefix(config).output_store
    if not settings.enabled or not config.replayed_outputs:
        return None
    return RunStore(settings, connect(settings))


def with_key_prefix(config: RunConfig) -> RunConfig:
    """The configuration with the key prefix that the run has.

    Unless one is configured, it is that of the run before in the same output directory, or a new one.
    """
    settings = config.output_store
    if not settings.enabled or not config.replayed_outputs or settings.key_prefix is not None:
        return config
    prefix = settings.config.get("key_prefix")
    if prefix is None and config.engine.type == "embedded":
        prefix = key_prefix_before(config.output_dir) or new_key_prefix(config.output_dir.name)
    settings = settings.model_copy(update={"key_prefix": prefix})
    return config.model_copy(update={"output_store": settings})


def key_prefix_before(output_dir: Path) -> str | None:
    """That of the run whose configuration lies in `output_dir`; None without one that can be read."""
    try:
        return load_config(output_dir / CONFIG_FILE).output_store.key_prefix
    except ConfigurationError:
        return None


def remove_left(run_store: RunStore) -> None:
    """Delete the objects that an earlier run left below the key prefix.

    The caller holds the output directory, so that none is running.
    """
    if removed := run_store.store.delete_objects(older_than_s=0.0):
        logger.warning("removed %d stored fields that the run before had left", removed)


def connect(settings: OutputStoreConfig) -> OutputStore:
    """A client of the configured store; the caller closes it. Raises as `open_run_store` does."""
    return OutputStore(backend=create_backend(settings.backend, settings.backend_config))


def new_key_prefix(run_name: str) -> str:
    """Make a key prefix that no other run has, also if both started in the same second.

    Garbage of a crashed run is found by it.
    """
    started = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    name = _NO_KEY_CHARACTER.sub("-", run_name)[:_LONGEST_NAME] or "run"
    return f"{name}-{started}-{secrets.token_hex(3)}/output-store"
