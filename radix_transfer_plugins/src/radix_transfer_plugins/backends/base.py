"""The backend contract: bytes in, bytes out.

A backend knows nothing of arrays, codecs or references. `OutputStore` is its only caller; every method may
be called from several threads at once. A backend passes the suite in
`radix_transfer_plugins.testing.backend`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import ClassVar, Self

import msgspec

from radix_transfer_plugins.codecs.base import Buffer
from radix_transfer_plugins.errors import CorruptObjectError


class ObjectInfo(msgspec.Struct, frozen=True):
    key: str
    stored_bytes: int
    created_s: float
    """Unix time of the put."""


class BackendStats(msgspec.Struct, frozen=True):
    objects: int
    used_bytes: int
    capacity_bytes: int | None
    """None: bounded by the machine only."""
    lent_bytes: int = 0
    """What this process's views of reads keep of the store's memory: also of deleted objects, which no longer
    count as used. 0 where views are memory of the reader.
    """


class Lease(ABC):
    """Bytes of a batched get, valid until `release`. The memory belongs to the backend.

    After `release` every access to `views` raises ReleasedViewError; a memoryview taken before is
    invalidated, never silently pointed at reused memory.
    """

    @property
    @abstractmethod
    def views(self) -> Sequence[memoryview]:
        """One read-only memoryview for each key, in the order asked."""

    @abstractmethod
    def release(self) -> None:
        """Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Backend(ABC):
    name: ClassVar[str]
    """Registered name, written into references."""
    reads_into_memory: ClassVar[bool] = False
    """True: `get_batch_into` costs less than `get_batch` and a copy, so `read_many` uses it."""
    key_prefix: str
    """Default prefix of an OutputStore on this backend; from the configuration key "key_prefix"."""
    place: str | None = None
    """What tells this store from others of the backend, such as a folder.

    Two clients that name different ones are in two stores. None: the backend has no such name.
    """

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """Connect.

        Unknown names and wrong types raise ConfigError, unreachable services StoreUnavailableError.
        """

    @classmethod
    def from_existing(cls, config: Mapping[str, object]) -> Self:
        """Connect as a tool that only looks: a store that is not there is not made.

        Backends that make their store when they connect override this. Raises what from_config raises, and
        StoreUnavailableError for a store that is not there.
        """
        return cls.from_config(config)

    @abstractmethod
    def put_batch(self, items: Sequence[tuple[str, Buffer]], *, waited_s: float = 0.0) -> None:
        """Store every item durably or none of them: the fields of one stash, or of up to 64 small ones.

        `waited_s`: how long the put waited elsewhere, which counts as waiting for room. So puts that queue
        behind others of a full store fail when each has waited as long as the backend is configured to.

        Raises KeyExistsError, StoreFullError, StoreUnavailableError.
        """

    @abstractmethod
    def get_batch(self, keys: Sequence[str]) -> Lease:
        """Raises ObjectLostError naming the absent keys, StoreUnavailableError."""

    def get_batch_into(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> None:
        """Read each key into the caller's writable flat buffer, which must have exactly its length.

        Backends that can read without an intermediate buffer override this. Raises what get_batch raises, and
        CorruptObjectError where a stored length differs from its buffer's; buffers then hold anything.
        """
        with self.get_batch(keys) as lease:
            for key, view, buffer in zip(keys, lease.views, buffers, strict=True):
                require_length(key, len(buffer), len(view))
                buffer[:] = view

    def get_range_into(self, key: str, stored_bytes: int, offset: int, buffer: memoryview) -> None:
        """Read the bytes from `offset` on of an object of `stored_bytes` into a writable flat buffer.

        Backends that can read a part without the rest override this. Raises as `get_batch_into` does.
        """
        with self.get_batch([key]) as lease:
            require_length(key, stored_bytes, len(lease.views[0]))
            # A cast, since a backend's bytes may have another format than the caller's.
            buffer[:] = lease.views[0][offset : offset + len(buffer)].cast("B")

    @abstractmethod
    def delete_batch(self, keys: Sequence[str]) -> None:
        """Forced: a reader's lease does not prevent it. An absent key counts as deleted."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix` (a plain string prefix)."""

    @abstractmethod
    def stats(self) -> BackendStats: ...

    @abstractmethod
    def close(self) -> None:
        """Release connections and mappings; stored objects stay. Idempotent."""


def require_length(key: str, expected_bytes: int, stored_bytes: int) -> None:
    """Raises CorruptObjectError for an object of another length than expected."""
    if stored_bytes != expected_bytes:
        raise CorruptObjectError(
            f"object {key!r}: expected {expected_bytes} bytes, the store holds {stored_bytes}"
        )
