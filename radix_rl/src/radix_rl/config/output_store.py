"""`[output_store]`: where replay outputs lie between engine and trainer."""

from typing import Any

from pydantic import Field, field_validator

from radix_rl.config.base import Bytes, Section
from radix_transfer_plugins.errors import ConfigError
from radix_transfer_plugins.keys import check_prefix


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
    max_concurrent_puts: int = Field(default=4, ge=1, le=1024)
    """Objects that the embedded engine writes at the same time."""
    read_buffer_bytes: Bytes = 256 << 20
    """Stored bytes that the trainer reads in one chunk."""

    @field_validator("key_prefix")
    @classmethod
    def _is_a_key(cls, key_prefix: str | None) -> str | None:
        try:
            return None if key_prefix is None else check_prefix(key_prefix)
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("key_prefix: ")) from error

    @property
    def backend_config(self) -> dict[str, Any]:
        """What the backend is created from: `config`, and `key_prefix` where it is set."""
        return self.config if self.key_prefix is None else self.config | {"key_prefix": self.key_prefix}
