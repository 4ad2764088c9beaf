"""`PutQueue`: stashes on their way into the store.

What waits is put together, on a bounded number of threads.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import numpy as np

from radix_transfer_plugins import StoreRef

logger = logging.getLogger(__name__)

TOGETHER_BYTES, TOGETHER_PUTS = 1 << 20, 64
"""Puts are taken together up to so many bytes of arrays: a small one costs less than a thread's turn."""
_SLOW_S = 0.1
"""Puts that took longer together waited for room, each for that of all: for ten times as long none goes with
another.
"""


@dataclass(eq=False, slots=True, kw_only=True)
class Put:
    stash: msgspec.Struct
    start_rows: Mapping[str, int]
    loop: asyncio.AbstractEventLoop
    ended: "asyncio.Future[None]"
    """Of `loop`: set when `result` is."""
    alone: bool = False
    """It failed together with others and is put once more, by itself: it cannot be cancelled any more."""
    result: "Future[StoreRef]" = field(default_factory=Future)
    """Cancelling it succeeds until the put begins."""

    queued_s: float = field(default_factory=time.monotonic)
    """When it was queued, on the monotonic clock."""
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        # What is no Struct of arrays is for the store to refuse.
        fields = getattr(self.stash, "__struct_fields__", ())
        arrays = (getattr(self.stash, name) for name in fields)
        self.num_bytes = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


class PutQueue:
    """Stashes on their way into the store, and the threads that put them.

    `put_all` puts what it is given and sets every result, or gives it to `put_alone`; it runs on one of
    `num_threads` threads.

    A thread takes what waits, up to TOGETHER_BYTES, and leaves the rest to the next one.
    """

    def __init__(self, put_all: Callable[[Sequence[Put]], None], num_threads: int) -> None:
        self._put_all = put_all
        self._lock = threading.Lock()
        self._waiting: deque[Put] = deque()
        self._turn_waits = False
        """A turn was given to the threads and has not begun: it will find what is added now."""
        self._alone_until_s = 0.0
        self._closed = False
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="output-store-put")

    def add(self, put: Put) -> None:
        """RuntimeError after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the output store writer is closed; no further put is accepted")
            self._waiting.append(put)
            try:
                self._ask_for_turn()
            except BaseException:  # No thread can be started.
                self._waiting.remove(put)
                raise

    def put_alone(self, puts: Sequence[Put]) -> None:
        """Each once more, by itself and before all others; from `put_all` only, also after `close`."""
        with self._lock:
            for put in puts:
                put.alone = True
            self._waiting.extendleft(reversed(puts))

    def close(self) -> None:
        """Wait until all is put. Idempotent."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=True)

    def _ask_for_turn(self) -> None:
        if self._waiting and not self._turn_waits:
            self._threads.submit(self._turn)
            self._turn_waits = True

    def _turn(self) -> None:
        with self._lock:
            self._turn_waits = False
        while puts := self._take():
            start_s = time.monotonic()
            try:
                self._put_all(puts)
            except BaseException as error:
                logger.exception("putting into the output store failed in an unexpected way")
                for put in puts:
                    if not put.result.done():
                        put.result.set_exception(error)
            end_s = time.monotonic()
            if len(puts) > 1 and end_s - start_s > _SLOW_S:
                self._alone_until_s = end_s + 10 * (end_s - start_s)
            _wake([put for put in puts if put.result.done()])

    def _take(self) -> list[Put]:
        """What goes to the store together, without what was cancelled."""
        with self._lock:
            taken: list[Put] = []
            num_bytes = 0
            most = TOGETHER_PUTS if time.monotonic() > self._alone_until_s else 1
            while self._waiting and len(taken) < most:
                put = self._waiting[0]
                if taken and (put.alone or taken[0].alone or num_bytes + put.num_bytes > TOGETHER_BYTES):
                    break
                self._waiting.popleft()
                if put.alone or put.result.set_running_or_notify_cancel():
                    taken.append(put)
                    num_bytes += put.num_bytes
            # This turn takes the rest if no other can be had, after `close`.
            with contextlib.suppress(RuntimeError):
                self._ask_for_turn()
            return taken


def _wake(puts: Sequence[Put]) -> None:
    """Each event loop once: waking it costs more than a result."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for put in puts:
        by_loop.setdefault(put.loop, []).append(put.ended)
    for loop, ended in by_loop.items():
        # A loop that was closed wakes nobody; its coroutines end when they are dropped.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_set_all, ended)


def _set_all(futures: Sequence["asyncio.Future[None]"]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
