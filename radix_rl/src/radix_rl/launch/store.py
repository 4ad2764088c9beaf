"""The run's client of the output store."""

import secrets
import time
from typing import Any

import msgspec

from radix_rl.config import RunConfig
from radix_transfer_plugins import OutputStore, create_backend


class RunStore(msgspec.Struct, frozen=True, eq=False):
    """The trainer's client, and what an engine needs to write where this client reads. Owned by who opened
    it."""

    backend: str
    config: dict[str, Any]
    """The backend's settings, key prefix included."""
    store: OutputStore

    def objects_left(self) -> int:
        """Stored fields below the run's prefix; 0 after every step whose references were deleted."""
        return sum(1 for _ in self.store.list_objects())

    def close(self) -> None:
        self.store.close()


def open_run_store(config: RunConfig) -> RunStore | None:
    """Connect; None when replay outputs travel inline or are not asked for. Raises the store's ConfigError
    and StoreUnavailableError."""
    settings = config.output_store
    if not settings.enabled or not config.replayed_outputs:
        return None
    backend_config = dict(settings.config)
    prefix = settings.key_prefix or backend_config.get("key_prefix")
    if prefix is None and config.engine.type == "embedded":
        prefix = new_key_prefix(config.output_dir.name)
    if prefix is not None:
        backend_config["key_prefix"] = prefix
    store = OutputStore(backend=create_backend(settings.backend, backend_config))
    return RunStore(settings.backend, backend_config, store)


def new_key_prefix(run_name: str) -> str:
    """One that no other run has, also when both started in the same second; garbage of a crashed run is
    found by it."""
    started = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{run_name}-{started}-{secrets.token_hex(3)}/output-store"
