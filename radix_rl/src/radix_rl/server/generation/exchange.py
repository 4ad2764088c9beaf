"""`Exchange`: one generation request from its parsed body to its last byte, owning everything in between.

All of it happens in one call frame, so that whatever ends it (an error, a client that leaves, a server that
stops) passes the one `finally` that ends the engine's requests and deletes the objects whose references were
not delivered.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radix_engine_plugins.handover import Owned
from radix_rl.concurrency import cancel_and_wait
from radix_rl.errors import EngineDeadError
from radix_rl.server.generation.body import Item
from radix_rl.server.http import error_body, error_response, is_expected, sse, status_of
from radix_rl.server.state import ServerState
from radix_rl.types import GenerateOutput, PartialOutput

logger = logging.getLogger(__name__)

_Shown = PartialOutput | GenerateOutput | None
"""What an engine request showed; None: it ended with an exception."""

_MAX_BEHIND = 16

TRANSPORT = "radix_rl.transport"
"""Key of the ASGI scope under which a server may give the connection's asyncio transport."""

_TAIL_BYTES = 3
"""Enough to hold back the last brace of a JSON object, also of one that two line ends follow in an event."""


class Renderer(ABC):
    """One API's form of the answer. `start_s` is on the clock of `time.perf_counter`."""

    openai: bool

    @abstractmethod
    def answer(self, outputs: Sequence[GenerateOutput], start_s: float) -> bytes:
        """The whole body, outputs in the order of the items."""

    @abstractmethod
    def partial(self, index: int, output: PartialOutput) -> bytes:
        """Server-sent events for item `index` while it grows. May be empty."""

    @abstractmethod
    def finish(self, index: int, output: GenerateOutput, start_s: float) -> bytes:
        """Events for item `index` at its end."""

    @abstractmethod
    def end(self) -> bytes:
        """Events after the last chunk of the last item."""


class _ClientGoneError(Exception):
    """The client left before it had its answer."""


class _News:
    """What the items showed and the client has not been sent, at most `_MAX_BEHIND` of each. A client that
    reads slowly misses partial outputs, each of which holds all tokens so far, instead of having them pile
    up in memory."""

    def __init__(self) -> None:
        self._order: asyncio.Queue[int] = asyncio.Queue()
        self._shown: defaultdict[int, deque[_Shown]] = defaultdict(deque)

    def put(self, index: int, shown: _Shown) -> None:
        waiting = self._shown[index]
        if len(waiting) == _MAX_BEHIND:
            waiting[-1] = shown
        else:
            waiting.append(shown)
            self._order.put_nowait(index)

    async def get(self) -> tuple[int, _Shown]:
        index = await self._order.get()
        return index, self._shown[index].popleft()


class Exchange(Response):
    def __init__(self, state: ServerState, items: list[Item], renderer: Renderer, *, stream: bool) -> None:
        """Raises RequestError for what this server cannot answer; nothing is started."""
        super().__init__()
        state.check(item.request for item in items)
        self._state = state
        self._items = items
        self._renderer = renderer
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._start_s, self._started = send, time.perf_counter(), False
        self._owned = Owned()
        self._transport: asyncio.Transport | None = scope.get(TRANSPORT)
        self._gone = asyncio.create_task(_until_disconnected(receive))
        metrics = self._state.metrics
        metrics.running.inc(len(self._items))
        try:
            await (self._send_stream() if self._stream else self._send_answer())
            metrics.requests.labels("answered").inc()
        except _ClientGoneError:
            metrics.requests.labels("disconnected").inc()
            logger.info("client left before its answer: %s", self._items[0].request.request_id)
        except Exception as error:
            metrics.requests.labels("refused" if status_of(error) < 500 else "failed").inc()
            if not is_expected(error):
                logger.exception("request %s failed", self._items[0].request.request_id)
            await self._send_error(error, scope, receive)
        except asyncio.CancelledError:
            metrics.requests.labels("failed").inc()
            await self._break_off(scope, receive)
        finally:
            metrics.running.dec(len(self._items))
            metrics.seconds.observe(time.perf_counter() - self._start_s)
            self._gone.cancel()
            self._owned.close()

    async def _send_answer(self) -> None:
        tasks = [asyncio.create_task(self._generate(item)) for item in self._items]
        try:
            await self._or_gone(asyncio.ensure_future(_all(tasks)))
        finally:
            await cancel_and_wait(tasks)
        outputs = [task.result() for task in tasks]
        body = self._renderer.answer(outputs, self._start_s)
        await self._start_response("application/json", len(body))
        await self._deliver(body, outputs, more_body=False)

    async def _send_stream(self) -> None:
        news = _News()
        tasks = [asyncio.create_task(self._pump(index, item, news)) for index, item in enumerate(self._items)]
        unfinished = len(tasks)
        try:
            while unfinished:
                index, output = await self._or_gone(asyncio.ensure_future(news.get()))
                if output is None:
                    # The pump ended with an exception, which this raises.
                    await tasks[index]
                    continue
                if not self._started:
                    await self._start_response("text/event-stream; charset=utf-8", None)
                if isinstance(output, GenerateOutput):
                    unfinished -= 1
                    events = self._renderer.finish(index, output, self._start_s)
                    await self._deliver(events, [output], more_body=True)
                elif events := self._renderer.partial(index, output):
                    await self._send({"type": "http.response.body", "body": events, "more_body": True})
        finally:
            await cancel_and_wait(tasks)
        await self._send({"type": "http.response.body", "body": self._renderer.end(), "more_body": False})

    async def _generate(self, item: Item) -> GenerateOutput:
        with self._state.registered(item.request.request_id):
            output = await self._state.engine.generate(item.request)
            # No await between the engine's return and this line: no cancellation can come between.
            self._take(output)
            return output

    async def _pump(self, index: int, item: Item, news: "_News") -> None:
        try:
            with self._state.registered(item.request.request_id):
                async for output in self._state.engine.stream(item.request):
                    if isinstance(output, GenerateOutput):
                        self._take(output)
                    news.put(index, output)
        except BaseException:
            news.put(index, None)
            raise

    def _take(self, output: GenerateOutput) -> None:
        if output.output_store_ref is not None:
            assert self._state.writer is not None, "create_app refuses an engine with a store and no writer"
            self._owned.add(output.output_store_ref, self._state.writer)
        metrics = self._state.metrics
        metrics.prompt_tokens.inc(output.prompt_tokens)
        metrics.output_tokens.inc(len(output.output_ids))
        metrics.cached_tokens.inc(output.cached_tokens)

    async def _or_gone(self, work: "asyncio.Future[Any]") -> Any:
        """The result of `work`, or _ClientGoneError once the client leaves; then `work` is cancelled."""
        try:
            await asyncio.wait({work, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise _ClientGoneError
            return work.result()
        finally:
            work.cancel()

    async def _client_is_gone(self) -> bool:
        """Whether what is written now would be dropped. A write right after it, without an await, is not."""
        # One pass of the loop, for servers that tell through ASGI only.
        await asyncio.sleep(0)
        return self._gone.done() or (self._transport is not None and self._transport.is_closing())

    async def _start_response(self, content_type: str, num_bytes: int | None) -> None:
        headers = [(b"content-type", content_type.encode())]
        if num_bytes is not None:
            headers.append((b"content-length", str(num_bytes).encode()))
        if await self._client_is_gone():
            raise _ClientGoneError
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._started = True

    async def _deliver(self, data: bytes, outputs: Sequence[GenerateOutput], *, more_body: bool) -> None:
        """Send `data`; with its tail the client becomes the owner of the objects it refers to.

        A client without the tail has no whole JSON and so no reference: if it leaves before, deleting is
        safe. Once the tail went to the transport, nobody here can know whether it was read, so nothing is
        deleted any more.
        """
        keys = [output.output_store_ref.key for output in outputs if output.output_store_ref is not None]
        if any(key in self._owned for key in keys):
            await self._send({"type": "http.response.body", "body": data[:-_TAIL_BYTES], "more_body": True})
            # Returns when the transport has passed on everything before, or has lost the connection.
            await self._send({"type": "http.response.body", "body": b"", "more_body": True})
            if await self._client_is_gone():
                raise _ClientGoneError
            data = data[-_TAIL_BYTES:]
        await self._send({"type": "http.response.body", "body": data, "more_body": more_body})
        for key in keys:
            self._owned.move(key, to=None)

    async def _break_off(self, scope: Scope, receive: Receive) -> None:
        """The server stops and waits no longer. A stream that has begun says so; else the connection ends
        without an answer, as that of a server that died: gateways and clients then ask another one."""
        if self._stream and self._started:
            error = EngineDeadError("the server stopped before this answer was complete")
            await self._send_error(error, scope, receive)
        elif self._transport is not None:
            self._transport.close()
            # Until the server knows, it would take a return without an answer for a mistake and send a 500.
            await self._gone
        else:
            raise asyncio.CancelledError

    async def _send_error(self, error: Exception, scope: Scope, receive: Receive) -> None:
        if not self._started:
            await error_response(error, self._renderer.openai)(scope, receive, self._send)
        elif self._stream:
            events = sse(error_body(error, self._renderer.openai)) + b"data: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": events, "more_body": False})
        else:
            # Half an answer is out; only an aborted connection tells the client that the rest will not come.
            raise error


async def _until_disconnected(receive: Receive) -> None:
    """The body was read already, so the next message is the client's leaving or the end of the response."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _all(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Wait for every task; raises the first error. Unlike those of `gather`, an end that nobody waits for is
    no error in the log."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()
