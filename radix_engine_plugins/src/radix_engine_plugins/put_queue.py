"""`PutQueue`: stashes on their way into the store. What waits is put together, on a bounded number of
threads.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import numpy as np

from radix_transfer_plugins import StoreRef

TOGETHER_BYTES = 1 << 20
"""Puts are taken together until their arrays have so many bytes: a small one costs less than a thread's
turn.
"""


@dataclass(eq=False, slots=True, kw_only=True)
class Put:
    stash: msgspec.Struct
    start_rows: Mapping[str, int]
    loop: asyncio.AbstractEventLoop
    ended: "asyncio.Future[None]"
    """Of `loop`: set when `result` is."""
    alone: bool = False
    """It failed together with others and is put once more, by itself."""
    result: "Future[StoreRef]" = field(default_factory=Future)
    """Cancelling it succeeds until the put begins."""

    @property
    def num_bytes(self) -> int:
        arrays = (getattr(self.stash, name) for name in self.stash.__struct_fields__)
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


class PutQueue:
    """`put_all` puts what it is given and sets every result; it runs on one of `num_threads` threads.

    A thread takes all that waits, up to TOGETHER_BYTES, and leaves the rest to the next one.
    """

    def __init__(self, put_all: Callable[[Sequence[Put]], None], num_threads: int) -> None:
        self._put_all = put_all
        self._lock = threading.Lock()
        self._waiting: deque[Put] = deque()
        self._turn_waits = False
        """A turn was given to the threads and has not begun: it will find what is added now."""
        self._closed = False
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="output-store-put")

    def add(self, put: Put) -> None:
        """RuntimeError after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the output store writer is closed; no further put is accepted")
            self._waiting.append(put)
            self._ask_for_turn()

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
            self._put_all(puts)
            _wake([put for put in puts if put.result.done()])

    def _take(self) -> list[Put]:
        """What goes to the store together, without what was cancelled."""
        with self._lock:
            taken: list[Put] = []
            num_bytes = 0
            while self._waiting and num_bytes < TOGETHER_BYTES:
                put = self._waiting[0]
                if taken and (put.alone or taken[-1].alone):
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
