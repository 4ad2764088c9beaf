"""`Worker`: the thread that owns the model.

It runs calls from the event loop between steps, and steps while there is work.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from radix_rl.engines.embedded.core import EngineCore
from radix_rl.engines.embedded.outbox import Outbox
from radix_rl.errors import EngineDeadError
from radix_rl.openmp_pool import end_pool

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_Call = tuple[Callable[[EngineCore], Any], Future[Any]]


class Worker:
    def __init__(self, make_core: Callable[[], EngineCore], num_threads: int | None, outbox: Outbox) -> None:
        """`make_core` runs on the new thread, since loading a model may take minutes.

        What requests put into `outbox` is sent after each step and call.
        """
        self._make_core = make_core
        self._outbox = outbox
        self._num_threads = num_threads
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._error: BaseException | None = None
        self.ready: Future[EngineCore] = Future()
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)

    def start(self) -> None:
        # From here on nobody can cancel it: the thread sets it whether or not somebody still waits.
        self.ready.set_running_or_notify_cancel()
        self._thread.start()

    def call(self, function: Callable[[EngineCore], _T]) -> Future[_T]:
        """Run `function` on the worker thread, between two steps.

        Raises EngineDeadError if the worker has ended.
        """
        future: Future[_T] = Future()
        with self._lock:
            self.check_alive()
            self._calls.put((function, future))
        return future

    def check_alive(self) -> None:
        if self._error is not None:
            raise EngineDeadError(
                f"the engine's worker died: {self._error!r}; build a new engine"
            ) from self._error
        if self._closed:
            raise EngineDeadError("the engine is closed")
        if not self._thread.is_alive():
            raise EngineDeadError("the engine's worker is not running; start the engine first")

    def close(self) -> None:
        """End the thread after the step that runs. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._calls.put(None)

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        core: EngineCore | None = None
        try:
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)
            core = self._make_core()
            self.ready.set_result(core)
            while self._serve_calls(core):
                if core.can_step:
                    core.step()
                    self._outbox.send()
        except BaseException as error:
            if core is None:
                self._end(None, error)
                self.ready.set_exception(error)
                return
            logger.exception("the embedded engine's worker died")
            self._end(core, error)
        else:
            self._end(core, None)

    def _serve_calls(self, core: EngineCore) -> bool:
        """Run every queued call; wait for one while there is nothing to step. False: the worker is to end."""
        while True:
            if not core.can_step:
                end_pool()
            try:
                item = self._calls.get(block=not core.can_step)
            except queue.Empty:
                return True
            if item is None:
                return False
            function, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(core)
            except Exception as error:
                self._outbox.send()
                future.set_exception(error)
            else:
                # First, so that whoever waits for an abort finds that the aborted have ended.
                self._outbox.send()
                future.set_result(result)

    def _end(self, core: EngineCore | None, error: BaseException | None) -> None:
        with self._lock:
            self._error = error
            self._closed = True
        reason = EngineDeadError(
            "the engine was closed"
            if error is None
            else f"the engine's worker died: {error!r}; build a new engine"
        )
        reason.__cause__ = error
        while not self._calls.empty():
            item = self._calls.get()
            if item is not None and item[1].set_running_or_notify_cancel():
                item[1].set_exception(reason)
        if core is not None:
            core.close(reason)
        self._outbox.send()
