"""`OutputStoreWriter`: puts off the event loop, and deletes what was never handed over."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from radix_engine_plugins.metrics import OutputStoreMetrics, own_metrics
from radix_transfer_plugins import OutputStore, StoreRef

logger = logging.getLogger(__name__)


class OutputStoreWriter:
    """Bounded number of concurrent puts on threads of its own; nothing here blocks the event loop.

    Ownership: `write` returned a reference -> the caller owns the object and calls `discard` if the
    reference never reaches its client. `write` raised or was cancelled, at any moment -> the writer removes
    whatever was stored.

    `write` and `discard` may be called from several threads and event loops at once. A put that waits for
    its turn holds its stash and nothing else: no thread, no buffer of the store.
    """

    def __init__(
        self, store: OutputStore, *, max_concurrent_puts: int = 4, metrics: OutputStoreMetrics | None = None
    ) -> None:
        """The writer owns `store` from here on and closes it. `metrics` default to a registry of the
        writer's own.
        """
        if max_concurrent_puts < 1:
            raise ValueError(f"max_concurrent_puts: expected 1 or more, got {max_concurrent_puts!r}")
        self.metrics = metrics if metrics is not None else own_metrics()
        self._store = store
        self._put_threads = ThreadPoolExecutor(max_concurrent_puts, thread_name_prefix="output-store-put")
        # Deletes have a thread of their own: a put that waits for room must never keep the delete that
        # makes room waiting.
        self._delete_thread = ThreadPoolExecutor(1, thread_name_prefix="output-store-delete")

    async def write(self, stash: msgspec.Struct, start_rows: Mapping[str, int] | None = None) -> StoreRef:
        """Store one stash. Raises the store's errors. Returns only when every reader can read the object.

        RuntimeError after `close`.
        """
        self.metrics.pending_puts.inc()
        try:
            put = self._put_threads.submit(self._put, stash, start_rows)
        except RuntimeError:
            self.metrics.pending_puts.dec()
            raise RuntimeError("the output store writer is closed; no further put is accepted") from None
        put.add_done_callback(lambda _: self.metrics.pending_puts.dec())
        try:
            return await asyncio.wrap_future(put)
        except BaseException:
            # Covers cancellation before the put started (it never will), while it runs and after it
            # ended, and a
            # coroutine that is closed because its loop goes away.
            if not put.cancel():
                put.add_done_callback(self._discard_result)
            raise

    def discard(self, refs: Sequence[StoreRef]) -> None:
        """Delete in the background objects whose reference was never handed over; failures are logged and
        counted.
        """
        refs = list(refs)
        if not refs:
            return
        try:
            self._delete_thread.submit(self._delete, refs)
        except RuntimeError:
            self.metrics.discard_failures.inc(len(refs))
            logger.error("output store writer is closed; left for garbage collection: %s", _keys(refs))

    async def close(self) -> None:
        """Wait for running puts and deletes, then close the store. Idempotent."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        # The order matters: the last puts may still hand deletes over, from their own threads.
        self._put_threads.shutdown(wait=True)
        self._delete_thread.shutdown(wait=True)
        self._store.close()

    def _put(self, stash: msgspec.Struct, start_rows: Mapping[str, int] | None) -> StoreRef:
        start_s = time.perf_counter()
        try:
            (ref,) = self._store.put_many([stash], start_rows=[dict(start_rows or {})])
        except BaseException:
            self.metrics.put_failures.inc()
            raise
        self.metrics.puts.inc()
        self.metrics.put_bytes.inc(sum(spec.stored_bytes for spec in ref.fields.values()))
        self.metrics.put_seconds.observe(time.perf_counter() - start_s)
        return ref

    def _discard_result(self, put: "Future[StoreRef]") -> None:
        if not put.cancelled() and put.exception() is None:
            self.discard([put.result()])

    def _delete(self, refs: list[StoreRef]) -> None:
        try:
            self._store.delete_many(refs)
        except Exception:
            self.metrics.discard_failures.inc(len(refs))
            logger.exception(
                "could not delete from the output store; left for garbage collection: %s", _keys(refs)
            )
        else:
            self.metrics.discards.inc(len(refs))


def _keys(refs: Sequence[StoreRef]) -> str:
    return ", ".join(ref.key for ref in refs)
