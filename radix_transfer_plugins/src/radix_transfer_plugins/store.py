"""`OutputStore`: stashes in, references out; references in, stashes back."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import msgspec

from radix_transfer_plugins.backends.base import Backend, ObjectInfo
from radix_transfer_plugins.codecs.base import Codec
from radix_transfer_plugins.ref import StoreRef

StashT = TypeVar("StashT", bound=msgspec.Struct)

RowRanges = Mapping[str, tuple[int, int]]
"""Field name -> absolute rows [start, end) wanted of it; a field not named is wanted whole."""

ReadRequest = tuple[StoreRef, Sequence[str]] | tuple[StoreRef, Sequence[str], RowRanges]


class OutputStore:
    """One client of one backend. Safe to call from several threads.

    `key_prefix` (default: the backend's) confines the store: keys are created below it, and a reference outside it is
    neither read nor deleted. `codecs` maps field names to codecs for writing (default: raw); readers need none, since a
    reference names its own.
    """

    def __init__(
        self,
        backend: Backend,
        key_prefix: str | None = None,
        codecs: Mapping[str, Codec] | None = None,
        max_array_bytes: int | None = None,
    ) -> None:
        raise NotImplementedError

    def put_many(
        self,
        stashes: Sequence[msgspec.Struct],
        *,
        start_rows: Sequence[Mapping[str, int]] | None = None,
    ) -> list[StoreRef]:
        """Store each stash with one backend call, all or nothing for the whole list; None fields are not stored.

        `start_rows[i]` gives the absolute first row of fields of stash i (default 0). When this returns, the data can be
        read by every client of the store.
        """
        raise NotImplementedError

    def get_many(
        self, requests: Sequence[ReadRequest], *, stash_type: type[StashT]
    ) -> AbstractContextManager[list[StashT]]:
        """Read-only views over the backend's buffers, valid inside the `with` block only."""
        raise NotImplementedError

    def read_many(
        self, requests: Sequence[ReadRequest], *, stash_type: type[StashT], buffer_bytes: int
    ) -> list[StashT]:
        """Copies that the caller owns, in chunks of at most `buffer_bytes` stored bytes; see docs/store.md."""
        raise NotImplementedError

    def delete_many(self, refs: Sequence[StoreRef]) -> None:
        """Idempotent. Raises KeyOutsidePrefixError before it deletes anything."""
        raise NotImplementedError

    def list_objects(self, *, older_than_s: float = 0.0) -> Iterator[ObjectInfo]:
        """Objects below the key prefix."""
        raise NotImplementedError

    def delete_objects(self, *, older_than_s: float) -> int:
        """Remove what crashed writers and readers left behind; the number of keys removed."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
