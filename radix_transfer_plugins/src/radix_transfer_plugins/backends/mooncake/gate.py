"""`LocalBufferGate`: retrying what found the client's local buffer full."""

import contextlib
import threading
from collections.abc import Iterator


class LocalBufferGate:
    """Runs attempts side by side, and retries alone.

    The retry of an attempt that found the buffer full runs with no other one running.

    An attempt that waits has returned from the client, so it holds no buffer: waiting cannot keep the buffer
    full, and any number of attempts that fail together all finish, one after the other. New attempts queue
    behind waiting retries.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._retries_waiting = 0
        self._alone = False

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Around a first attempt."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._retries_waiting)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def retry(self) -> Iterator[None]:
        """Around the one retry, outside of `attempt`."""
        alone = False
        try:
            with self._changed:
                self._retries_waiting += 1
                try:
                    self._changed.wait_for(lambda: not self._alone and not self._running)
                    self._alone = alone = True
                finally:
                    self._retries_waiting -= 1
            yield
        finally:
            # An interrupt ends the wait too; first attempts must not queue behind it for ever.
            with self._changed:
                if alone:
                    self._alone = False
                self._changed.notify_all()
