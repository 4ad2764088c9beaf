"""Backends and codecs by name.

Registered in code, or found through entry points and imported on first use.
"""

from collections.abc import Mapping

import msgspec

from radix_transfer_plugins.backends.base import Backend
from radix_transfer_plugins.class_registry import ClassRegistry
from radix_transfer_plugins.codecs.base import Codec
from radix_transfer_plugins.errors import ConfigError

_backends = ClassRegistry(
    "backend",
    Backend,
    group="radix_transfer_plugins.backends",
    builtin={
        "memory": "radix_transfer_plugins.backends.memory:MemoryBackend",
        "shared_memory": "radix_transfer_plugins.backends.shared_memory:SharedMemoryBackend",
        "mooncake": "radix_transfer_plugins.backends.mooncake:MooncakeBackend",
    },
)
_codecs = ClassRegistry(
    "codec",
    Codec,
    group="radix_transfer_plugins.codecs",
    builtin={
        "raw": "radix_transfer_plugins.codecs.raw:RawCodec",
        "narrow": "radix_transfer_plugins.codecs.narrow:NarrowCodec",
        "experts": "radix_transfer_plugins.codecs.experts:ExpertsCodec",
        "deltas": "radix_transfer_plugins.codecs.deltas:DeltasCodec",
        "positions": "radix_transfer_plugins.codecs.positions:PositionsCodec",
        "position_blocks": "radix_transfer_plugins.codecs.positions:PositionBlocksCodec",
    },
)


def register_backend(cls: type[Backend]) -> type[Backend]:
    """Make a backend known by its name. A name that is taken is refused. Usable as a decorator."""
    return _backends.register(cls)


def register_codec(cls: type[Codec]) -> type[Codec]:
    """Make a codec known by its name. A name that is taken is refused. Usable as a decorator."""
    return _codecs.register(cls)


def backend_names() -> list[str]:
    """Every name that `create_backend` takes, without importing any of them."""
    return _backends.names()


def codec_names() -> list[str]:
    """Every codec that a reference may name, without importing any of them."""
    return _codecs.names()


def knows_backend(name: str) -> bool:
    return _backends.knows(name)


def knows_codec(name: str) -> bool:
    return _codecs.knows(name)


def get_codec(name: str) -> type[Codec]:
    """The codec class of that name. Raises ConfigError naming the known codecs."""
    return _codecs.get(name)


def create_backend(
    name: str, config: str | Mapping[str, object] | None = None, *, existing: bool = False
) -> Backend:
    """Connect to a backend.

    `config` is a JSON object, as text or parsed. `existing`: a store that is not there is not made, but
    StoreUnavailableError. Raises ConfigError naming the known backends.
    """
    cls = _backends.get(name)
    if isinstance(config, str):
        try:
            config = msgspec.json.decode(config)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"configuration of backend {name!r}: expected a JSON object, got {config!r}: {error}"
            ) from error
    config = {} if config is None else config
    if not isinstance(config, Mapping):
        raise ConfigError(f"configuration of backend {name!r}: expected a JSON object, got {config!r}")
    try:
        return cls.from_existing(config) if existing else cls.from_config(config)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"backend {name!r} needs the module {error.name!r}, which is not installed; pip install "
            f"'radix-transfer-plugins[{name}]'"
        ) from error
