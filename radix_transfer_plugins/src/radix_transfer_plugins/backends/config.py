"""Backend configurations: a msgspec Struct a backend, filled from JSON types, unknown names refused."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from radix_transfer_plugins.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=msgspec.Struct)

DEFAULT_KEY_PREFIX = "output-store"


def parse_config(config: Mapping[str, object], to: type[ConfigT], backend: str) -> ConfigT:
    """Fill the Struct `to`. Raises ConfigError naming the option and the known ones."""
    known = [field.encode_name for field in msgspec.structs.fields(to)]
    unknown = [name for name in config if name not in known]
    if unknown:
        raise ConfigError(
            f"backend {backend!r}: unknown option {unknown[0]!r}; known options: {', '.join(known)}"
        )
    try:
        return msgspec.convert(dict(config), to)
    except msgspec.ValidationError as error:
        raise ConfigError(f"backend {backend!r}: {error}; known options: {', '.join(known)}") from error
