"""Configuration of the shared_memory backend."""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from radix_transfer_plugins.backends.config import DEFAULT_KEY_PREFIX, parse_config
from radix_transfer_plugins.errors import ConfigError
from radix_transfer_plugins.keys import check_prefix
from radix_transfer_plugins.sizes import parse_bytes, parse_seconds

_PARENT = Path("/dev/shm")
_SPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


def existing_spaces() -> list[str]:
    """Names of the spaces of this machine, of every user."""
    return sorted(path.name.removeprefix("radix-") for path in _PARENT.glob("radix-*") if path.is_dir())


class SharedMemoryOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user writes. Processes that name the same space (or directory) share one store."""

    space: str | None = None
    """Name of the store on this machine; its files lie in /dev/shm/radix-<space>. Default "default"."""
    directory: str | None = None
    """Where the files lie instead of a named space; on a tmpfs."""
    capacity_bytes: int | str | None = None
    """Limit of the stored bytes of all processes together, such as "8gb"; None: what the tmpfs holds."""
    wait_s: float | str = 30.0
    """How long a put waits for room before it raises StoreFullError."""
    key_prefix: str = DEFAULT_KEY_PREFIX


class SharedMemoryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The options, checked and in their units."""

    path: Path
    capacity_bytes: int | None
    wait_s: float
    key_prefix: str

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> "SharedMemoryConfig":
        """Raises ConfigError naming the known options."""
        options = parse_config(config, SharedMemoryOptions, "shared_memory")
        if options.directory is not None and options.space is not None:
            raise ConfigError(
                "backend 'shared_memory': space and directory exclude each other; drop one of them"
            )
        space = "default" if options.space is None else options.space
        if not _SPACE.fullmatch(space):
            raise ConfigError(
                "backend 'shared_memory': space: expected letters, digits and ._- such as 'run-1', got "
                f"{space!r}"
            )
        return cls(
            # Absolute, since a forked child that changed its directory opens it again.
            path=(
                _PARENT / f"radix-{space}" if options.directory is None else Path(options.directory)
            ).absolute(),
            capacity_bytes=None
            if options.capacity_bytes is None
            else parse_bytes(options.capacity_bytes, "capacity_bytes"),
            wait_s=parse_seconds(options.wait_s, "wait_s"),
            key_prefix=check_prefix(options.key_prefix),
        )
