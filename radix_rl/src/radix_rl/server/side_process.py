"""`SideProcesses`: work on what clients send that may take long, in processes that can be killed.

A thread would not do: decoding and tokenizing hold Python's lock, and nothing ends a thread.
"""

import asyncio
import contextlib
import ctypes
import multiprocessing
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from radix_rl.errors import EngineError, RequestError
from radix_rl.server.http import BusyError

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_PRELOADED = ["radix_rl.server.generation.openai.bodies", "transformers.tokenization_utils_fast"]
"""Imported once, by the process that the others are forked from: a new one is there in milliseconds."""


class SideProcesses:
    """A fixed number of processes, started when the first is needed. Used by one event loop.

    They end with this one, also when it is killed. Only this process and its children write to their pipes.
    """

    def __init__(self, count: int, tokenizer: Any, timeout_s: float) -> None:
        """`timeout_s`: how long one call may wait, and then how long it may work."""
        self._timeout_s = timeout_s
        self._tokenizer = pickle.dumps(tokenizer)
        self._idle: asyncio.Queue[_Process] = asyncio.Queue()
        self._all = [_Process() for _ in range(count)]
        for process in self._all:
            self._idle.put_nowait(process)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="side-process")

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """`function(tokenizer, *args)`, where `tokenizer()` is the server's tokenizer.

        Function, arguments, result and errors are pickled. Raises what the function raises, RequestError
        if it takes too long, BusyError if others do.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                process = await self._idle.get()
        except TimeoutError as error:
            raise BusyError(
                f"the server is busy with the long requests of others, for more than {self._timeout_s:g} s; "
                "try again later"
            ) from error
        try:
            return await self._run_in(process, function, args)
        finally:
            self._idle.put_nowait(process)

    async def _run_in(self, process: "_Process", function: Callable[..., T], args: tuple[Any, ...]) -> T:
        loop = asyncio.get_running_loop()
        if not process.is_alive():
            await loop.run_in_executor(self._threads, process.start, self._tokenizer)
        work = loop.run_in_executor(self._threads, process.call, function, args)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(work)
        except TimeoutError as error:
            raise RequestError(
                f"the request could not be prepared within {self._timeout_s:g} s: its text, or the rendering "
                "of its messages, takes too long; send less"
            ) from error
        finally:
            if not work.done():
                # Too long, or nobody waits any more. The thread ends with the process.
                process.kill()
                work.add_done_callback(lambda done: done.exception())

    def close(self) -> None:
        """End every process, working or not. Idempotent."""
        for process in self._all:
            process.kill()
        self._threads.shutdown(wait=False)


class _Process:
    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None

    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def start(self, tokenizer: bytes) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, tokenizer), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        assert self._pipe is not None, "start comes first"
        pipe = self._pipe
        try:
            pipe.send((function, args))
            is_result, value = pipe.recv()
        except (EOFError, OSError) as error:
            raise EngineError("the process that prepares requests was ended; try again") from error
        if is_result:
            return value
        raise value

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()


def _serve(pipe: Connection, pickled_tokenizer: bytes) -> None:
    """The life of a side process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    @lru_cache(maxsize=1)
    def tokenizer() -> Any:
        return pickle.loads(pickled_tokenizer)

    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, function(tokenizer, *args)
        except Exception as error:
            answer = False, error
        pipe.send(answer)
