"""`[output_store]`: where replay outputs lie between engine and trainer."""

from typing import Any

from pydantic import Field

from radix_rl.config.base import Bytes, Section


class OutputStoreConfig(Section):
    """The output store. Disabled, replay outputs travel inline in the engine's answers."""

    enabled: bool = True
    backend: str = "shared_memory"
    """Registered backend name: "memory" (one process), "shared_memory" (one machine), "mooncake" (many
    machines)."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The backend's own settings, passed on unchanged."""
    key_prefix: str | None = None
    """Prefix of this run's keys. Unset: made from the output directory's name and the start time."""
    read_buffer_bytes: Bytes = 256 << 20
    """Stored bytes that the trainer reads in one chunk."""
