"""Backends and codecs by name.

Registered in code, or found through entry points and imported on first use.
"""

import threading
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

import msgspec

from radix_transfer_plugins.backends.base import Backend
from radix_transfer_plugins.codecs.base import Codec
from radix_transfer_plugins.errors import ConfigError

T = TypeVar("T", bound=Backend | Codec)


class _Registry(Generic[T]):
    """Classes by name.

    Built-in names work without an installed package; entry points are read once, when first needed.
    """

    def __init__(self, kind: str, base: type[T], builtin: Mapping[str, str]) -> None:
        self._kind = kind
        self._base = base
        self._group = f"radix_transfer_plugins.{kind}s"
        self._builtin = builtin
        self._classes: dict[str, type[T]] = {}
        self._found: dict[str, set[str]] | None = None
        self._lock = threading.RLock()

    def register(self, cls: type[T]) -> type[T]:
        name = getattr(cls, "name", None)
        if not (isinstance(cls, type) and issubclass(cls, self._base) and isinstance(name, str) and name):
            raise ConfigError(
                f"expected a {self._base.__name__} class with a name, got {cls!r} (name {name!r})"
            )
        with self._lock:
            if self.knows(name):
                if self._classes.get(name) is cls:
                    return cls
                raise ConfigError(
                    f"{self._kind} name {name!r} is taken; known {self._kind}s: {self._listed()}"
                )
            self._classes[name] = cls
        return cls

    def get(self, name: str) -> type[T]:
        with self._lock:
            if name not in self._classes:
                self._classes[name] = self._load(name)
            return self._classes[name]

    def knows(self, name: str) -> bool:
        with self._lock:
            return name in self._classes or name in self._sources()

    def names(self) -> list[str]:
        with self._lock:
            return sorted({*self._classes, *self._sources()})

    def _listed(self) -> str:
        return ", ".join(self.names())

    def _sources(self) -> dict[str, set[str]]:
        """Name -> the places ("module:Class") that claim it.

        More than one is refused when the name is used.
        """
        if self._found is None:
            found = {name: {place} for name, place in self._builtin.items()}
            for point in entry_points(group=self._group):
                found.setdefault(point.name, set()).add(point.value)
            self._found = found
        return self._found

    def _load(self, name: str) -> type[T]:
        places = self._sources().get(name)
        if places is None:
            raise ConfigError(f"unknown {self._kind} {name!r}; known {self._kind}s: {self._listed()}")
        if len(places) > 1:
            raise ConfigError(
                f"{self._kind} name {name!r} is claimed by {' and '.join(sorted(places))}; uninstall one "
                "of them"
            )
        (place,) = places
        try:
            cls = EntryPoint(name, place, self._group).load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{self._kind} {name!r} cannot be imported from {place!r}: {error}") from error
        if not (isinstance(cls, type) and issubclass(cls, self._base) and cls.name == name):
            raise ConfigError(f"{place!r} is registered as {self._kind} {name!r} but is {cls!r}")
        return cls


_backends = _Registry(
    "backend",
    Backend,
    {
        "memory": "radix_transfer_plugins.backends.memory:MemoryBackend",
        "shared_memory": "radix_transfer_plugins.backends.shared_memory:SharedMemoryBackend",
        "mooncake": "radix_transfer_plugins.backends.mooncake:MooncakeBackend",
    },
)
_codecs = _Registry(
    "codec",
    Codec,
    {
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


def create_backend(name: str, config: str | Mapping[str, object] | None = None) -> Backend:
    """Connect to a backend.

    `config` is a JSON object, as text or parsed. Raises ConfigError naming the known backends.
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
        return cls.from_config(config)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"backend {name!r} needs the module {error.name!r}, which is not installed; "
            f"pip install 'radix-transfer-plugins[{name}]'"
        ) from error
