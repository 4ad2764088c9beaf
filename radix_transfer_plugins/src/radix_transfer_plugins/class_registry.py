"""Classes by name: registered in code, or found through entry points and imported on first use."""

import threading
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from radix_transfer_plugins.errors import ConfigError

T = TypeVar("T")


class ClassRegistry(Generic[T]):
    """Classes of one kind by name.

    Built-in names work without an installed package; entry points are read once, when first needed, and
    imported when their class is asked for. A name that is claimed twice is refused.
    """

    def __init__(self, kind: str, base: type[T], *, group: str, builtin: Mapping[str, str]) -> None:
        """`kind`: the word for it in errors.

        `base`: what every class derives from, with its `name`. `group`: of the entry points. `builtin`: name
        -> "module:Class".
        """
        self._kind = kind
        self._base = base
        self._group = group
        self._builtin = builtin
        self._classes: dict[str, type[T]] = {}
        self._found: dict[str, set[str]] | None = None
        self._lock = threading.RLock()

    def register(self, cls: type[T]) -> type[T]:
        """Make a class known in this process. Raises ConfigError for a name that is taken."""
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
        """The class of that name. Raises ConfigError naming the known ones."""
        with self._lock:
            if name not in self._classes:
                self._classes[name] = self._load(name)
            return self._classes[name]

    def knows(self, name: str) -> bool:
        with self._lock:
            return name in self._classes or name in self._sources()

    def names(self) -> list[str]:
        """Every known name, without importing any class."""
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
        if isinstance(cls, type) and issubclass(cls, self._base) and getattr(cls, "name", None) == name:
            return cls
        raise ConfigError(f"{place!r} is registered as {self._kind} {name!r} but is {cls!r}")
