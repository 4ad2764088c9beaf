"""`OutputStoreWriter`: puts off the event loop, and deletes what was never handed over."""

from collections.abc import Mapping, Sequence

import msgspec
from radix_transfer_plugins import OutputStore, StoreRef


class OutputStoreWriter:
    """Bounded number of concurrent puts on threads of its own; nothing here blocks the event loop.

    Ownership: `write` returned a reference -> the caller owns the object and calls `discard` if the reference never
    reaches its client. `write` raised or was cancelled, at any moment -> the writer removes whatever was stored.
    """

    def __init__(self, store: OutputStore, *, max_concurrent_puts: int = 4) -> None:
        raise NotImplementedError

    async def write(self, stash: msgspec.Struct, start_rows: Mapping[str, int] | None = None) -> StoreRef:
        """Store one stash. Raises the store's errors. Returns only when every reader can read the object."""
        raise NotImplementedError

    def discard(self, refs: Sequence[StoreRef]) -> None:
        """Delete in the background objects whose reference was never handed over; failures are logged and counted."""
        raise NotImplementedError

    async def close(self) -> None:
        """Wait for running puts and deletes, then close the store."""
        raise NotImplementedError
