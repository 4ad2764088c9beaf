"""`OutputStoreWriter`: puts off the event loop, and deletes what was never handed over."""

import asyncio
import copy
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from radix_engine_plugins.metrics import OutputStoreMetrics, own_metrics
from radix_engine_plugins.put_queue import Put, PutQueue
from radix_transfer_plugins import OutputStore, StoreRef
from radix_transfer_plugins.errors import StoreUnavailableError

logger = logging.getLogger(__name__)

_LAST_WRITES_S = 1.0
"""`close` waits so long for event loops to take the last results."""


class OutputStoreWriter:
    """Puts stashes on a bounded number of threads, small ones together.

    Nothing here blocks the event loop.

    Ownership: `write` returned a reference -> the caller owns the object and calls `discard` if the
    reference never reaches its client. `write` raised or was cancelled, at any moment -> the writer removes
    whatever was stored.

    `write` and `discard` may be called from several threads and event loops at once. A put that waits for
    its turn holds its stash and nothing else: no thread, no buffer of the store. Waiting for a turn counts as
    waiting for room: in a full store each put fails after the backend's `wait_s`, however many wait.
    """

    def __init__(
        self, store: OutputStore, *, max_concurrent_puts: int = 4, metrics: OutputStoreMetrics | None = None
    ) -> None:
        """The writer owns `store` from here on and closes it.

        `metrics` default to a registry of the writer's own.
        """
        if max_concurrent_puts < 1:
            raise ValueError(f"max_concurrent_puts: expected 1 or more, got {max_concurrent_puts!r}")
        self.metrics = metrics if metrics is not None else own_metrics()
        self._store = store
        self.key_prefix = store.key_prefix
        self.place = store.backend.place
        self._puts = PutQueue(self._put_all, max_concurrent_puts)
        self._writes: set[Put] = set()
        """Whose `write` has not returned."""
        # Deletes have a thread of their own: a put that waits for room must never keep the delete that
        # makes room waiting.
        self._delete_thread = ThreadPoolExecutor(1, thread_name_prefix="output-store-delete")

    async def write(self, stash: msgspec.Struct, start_rows: Mapping[str, int] | None = None) -> StoreRef:
        """Store one stash. Raises the store's errors. Returns only when every reader can read the object.

        RuntimeError after `close`.
        """
        loop = asyncio.get_running_loop()
        put = Put(stash=stash, start_rows=dict(start_rows or {}), loop=loop, ended=loop.create_future())
        self.metrics.pending_puts.inc()
        put.result.add_done_callback(lambda _: self.metrics.pending_puts.dec())
        try:
            self._puts.add(put)
        except BaseException:
            put.result.cancel()
            raise
        self._writes.add(put)
        try:
            await put.ended
            return put.result.result()
        except BaseException:
            # Covers cancellation before the put started (it never will), while it runs and after it ended,
            # and a coroutine that is closed because its loop goes away.
            if not put.result.cancel():
                put.result.add_done_callback(self._discard_result)
            raise
        finally:
            self._writes.discard(put)

    def discard(self, refs: Sequence[StoreRef]) -> None:
        """Delete in the background objects whose reference was never handed over.

        Failures are logged and counted.
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
        # The order matters: the last puts may still hand deletes over, and so may those who wait for them.
        await asyncio.to_thread(self._puts.close)
        deadline_s = time.monotonic() + _LAST_WRITES_S
        while self._writes and time.monotonic() < deadline_s:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._delete_thread.shutdown(wait=True)
        self._store.close()

    def _put_all(self, puts: Sequence[Put]) -> None:
        start_s = time.perf_counter()
        try:
            refs = self._store.put_many(
                [put.stash for put in puts],
                start_rows=[put.start_rows for put in puts],
                # Of the oldest: where the others have time left, they are put alone again.
                waited_s=time.monotonic() - min(put.queued_s for put in puts),
            )
        except BaseException as error:
            if len(puts) > 1 and not isinstance(error, StoreUnavailableError):
                # One that the store refuses must not fail the others.
                self._puts.put_alone(puts)
                return
            for put in puts:
                # Each its own: raising one in several tasks would mix their tracebacks.
                put.result.set_exception(error if len(puts) == 1 else copy.copy(error))
            self.metrics.put_failures.inc(len(puts))
            return
        seconds = time.perf_counter() - start_s
        for put, ref in zip(puts, refs, strict=True):
            put.result.set_result(ref)
        self.metrics.puts.inc(len(puts))
        self.metrics.put_bytes.inc(sum(spec.stored_bytes for ref in refs for spec in ref.fields.values()))
        for _ in puts:
            self.metrics.put_seconds.observe(seconds)

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
