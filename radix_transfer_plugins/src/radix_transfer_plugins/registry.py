"""Backends and codecs by name: registered in code, or found through entry points and imported on first use."""

from collections.abc import Mapping

from radix_transfer_plugins.backends.base import Backend
from radix_transfer_plugins.codecs.base import Codec


def register_backend(cls: type[Backend]) -> type[Backend]:
    """Make a backend known by its name. A name that is taken is refused. Usable as a decorator."""
    raise NotImplementedError


def register_codec(cls: type[Codec]) -> type[Codec]:
    raise NotImplementedError


def create_backend(name: str, config: str | Mapping[str, object] | None = None) -> Backend:
    """Connect to a backend. `config` is a JSON object, as text or parsed. Raises ConfigError naming the known backends."""
    raise NotImplementedError
