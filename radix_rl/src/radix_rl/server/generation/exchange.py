"""`Exchange`: one generation request from its parsed body to its last byte, owning everything in between.

All of it happens in one call frame, so that whatever ends it (an error, a client that leaves, a server that
stops) passes the one `finally` that ends the engine's requests and deletes the objects whose references were
not delivered.
"""

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radix_engine_plugins.handover import Owned
from radix_rl.concurrency import cancel_and_wait
from radix_rl.errors import EngineDeadError, RequestError
from radix_rl.server.http import error_body, error_response, is_expected, sse, status_of
from radix_rl.server.items import GenerateCall, Item
from radix_rl.server.state import ServerState
from radix_rl.types import GenerateOutput, PartialOutput

logger = logging.getLogger(__name__)

_Shown = PartialOutput | GenerateOutput | None
"""What an engine request showed; None: it ended with an exception."""

_MAX_BEHIND = 16

_STEPS_AHEAD = 2
"""As many requests of one call are with the engine as it runs in this many steps: when some end, others wait
already. Each costs the event loop time while it is there."""

_DEFAULT_STEP = 256
"""Requests in a step of an engine that does not tell."""

_AT_ONCE = 8
"""Items that are started or ended before the event loop turns to others."""

TRANSPORT = "radix_rl.transport"
"""Key of the ASGI scope under which a server may give the connection's asyncio transport."""

_TAIL_BYTES = 3
"""Enough to hold back the last brace of a JSON object, also of one that two line ends follow in an event."""


class Renderer(ABC):
    """One API's form of the answer. `start_s` is on the clock of `time.perf_counter`."""

    openai: bool

    @abstractmethod
    def part(self, item: Item, output: GenerateOutput, start_s: float) -> bytes:
        """One item of a whole answer, as JSON."""

    @abstractmethod
    def answer(self, parts: Sequence[bytes]) -> bytes:
        """The whole body, from the parts in the order of the items."""

    @abstractmethod
    def partial(self, item: Item, output: PartialOutput) -> bytes:
        """Server-sent events for an item while it grows. May be empty."""

    @abstractmethod
    def finish(self, item: Item, output: GenerateOutput, start_s: float) -> bytes:
        """Events for an item at its end."""

    @abstractmethod
    def end(self) -> bytes:
        """Events after the last chunk of the last item."""


class _ClientGoneError(Exception):
    """The client left before it had its answer."""


class _News:
    """What the items showed and the client has not been sent, at most `_MAX_BEHIND` of each.

    A client that reads slowly misses partial outputs, each of which holds all tokens so far, instead of
    having them pile up in memory.
    """

    def __init__(self) -> None:
        self._order: asyncio.Queue[Item] = asyncio.Queue()
        self._shown: defaultdict[int, deque[_Shown]] = defaultdict(deque)

    def put(self, item: Item, shown: _Shown) -> None:
        waiting = self._shown[item.index]
        if len(waiting) == _MAX_BEHIND:
            waiting[-1] = shown
        else:
            waiting.append(shown)
            self._order.put_nowait(item)

    async def get(self) -> tuple[Item, _Shown]:
        item = await self._order.get()
        return item, self._shown[item.index].popleft()


class _Tasks:
    """The work on the items of one call, in their order, on `max_running` of them at a time."""

    def __init__(
        self, items: Iterable[Item], work: Callable[[Item], Coroutine[Any, Any, None]], max_running: int
    ) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when all have ended, or with the first error."""
        self._running: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(max_running)
        self._starting = asyncio.create_task(self._start_all(items, work))
        self._starting.add_done_callback(self._settle)

    async def _start_all(
        self, items: Iterable[Item], work: Callable[[Item], Coroutine[Any, Any, None]]
    ) -> None:
        """A few at a time: what others wait for comes between."""
        for count, item in enumerate(items, start=1):
            await self._room.acquire()
            task = asyncio.create_task(work(item))
            self._running.add(task)
            task.add_done_callback(self._on_end)
            if count % _AT_ONCE == 0:
                await asyncio.sleep(0)

    async def cancel(self) -> None:
        """End them all and wait for it, a few at a time. Errors are those of `finished`."""
        await cancel_and_wait([self._starting])
        if not self.finished.cancel() and not self.finished.cancelled():
            # Whoever ends them may have an error of its own to raise.
            self.finished.exception()
        while self._running:
            await cancel_and_wait(itertools.islice(self._running, _AT_ONCE))

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        self._room.release()
        self._settle(task)

    def _settle(self, ended: "asyncio.Task[None]") -> None:
        error = None if ended.cancelled() else ended.exception()
        if self.finished.done():
            return
        if error is not None:
            self.finished.set_exception(error)
        elif self._starting.done() and not self._running:
            self.finished.set_result(None)


class Exchange(Response):
    def __init__(self, state: ServerState, call: GenerateCall, renderer: Renderer) -> None:
        super().__init__()
        self._state = state
        self._call = call
        self._renderer = renderer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._start_s, self._started = send, time.perf_counter(), False
        self._owned = Owned()
        self._transport: asyncio.Transport | None = scope.get(TRANSPORT)
        self._gone = asyncio.create_task(_until_disconnected(receive))
        metrics = self._state.metrics
        metrics.running.inc(self._call.num_items)
        try:
            with self._state.queue() as self._queue:
                await self._check()
                await (self._send_stream() if self._call.stream else self._send_answer())
            metrics.requests.labels("answered").inc()
        except _ClientGoneError:
            metrics.requests.labels("disconnected").inc()
            logger.info("client left before its answer: %s", self._call.name)
        except Exception as error:
            metrics.requests.labels("refused" if status_of(error) < 500 else "failed").inc()
            if not is_expected(error):
                logger.exception("request %s failed", self._call.name)
            await self._send_error(error, scope, receive)
        except asyncio.CancelledError:
            metrics.requests.labels("failed").inc()
            await self._break_off(scope, receive)
        finally:
            metrics.running.dec(self._call.num_items)
            metrics.seconds.observe(time.perf_counter() - self._start_s)
            self._gone.cancel()
            self._owned.close()

    async def _check(self) -> None:
        """Refuse, before anything starts, what the engine cannot answer."""
        for count, item in enumerate(self._call.items(samples=1)):
            try:
                self._state.engine.check(item.request)
            except RequestError as error:
                if not self._call.is_list:
                    raise
                raise RequestError(f"prompt {count}: {error}") from error
            # Long prompts take their time; short ones come in crowds.
            await asyncio.sleep(0)

    async def _send_answer(self) -> None:
        parts, keys = [b""] * self._call.num_items, list[str]()

        async def generate(item: Item) -> None:
            output = await self._generate(item)
            parts[item.index] = self._renderer.part(item, output, self._start_s)
            keys.extend(_keys(output))

        tasks = await self._start(generate)
        try:
            await self._or_gone(tasks.finished)
        finally:
            await tasks.cancel()
        body = self._renderer.answer(parts)
        await self._start_response("application/json", len(body))
        await self._deliver(body, keys, more_body=False)

    async def _send_stream(self) -> None:
        news, unfinished = _News(), self._call.num_items
        tasks = await self._start(lambda item: self._pump(item, news))
        try:
            while unfinished:
                item, output = await self._or_gone(asyncio.ensure_future(news.get()))
                if output is None:
                    # A pump ended with an exception, which this raises.
                    await tasks.finished
                    continue
                if not self._started:
                    await self._start_response("text/event-stream; charset=utf-8", None)
                if isinstance(output, GenerateOutput):
                    unfinished -= 1
                    events = self._renderer.finish(item, output, self._start_s)
                    await self._deliver(events, _keys(output), more_body=True)
                elif events := self._renderer.partial(item, output):
                    await self._send({"type": "http.response.body", "body": events, "more_body": True})
        finally:
            await tasks.cancel()
        await self._send({"type": "http.response.body", "body": self._renderer.end(), "more_body": False})

    async def _start(self, work: Callable[[Item], Coroutine[Any, Any, None]]) -> _Tasks:
        info = await self._state.engine.info()
        return _Tasks(self._call.items(), work, _STEPS_AHEAD * (info.max_running_requests or _DEFAULT_STEP))

    async def _ended(self, item: Item) -> GenerateOutput | None:
        """The answer of a request that was aborted before the engine knew it; None: it was not."""
        reason = self._queue.reason(item.request.request_id)
        if reason is None:
            return None
        return GenerateOutput(
            request_id=item.request.request_id,
            prompt_tokens=len(item.request.input_ids),
            output_ids=(),
            output_logprobs=(),
            finish_reason=reason,
            version_spans=(),
            weight_version=(await self._state.engine.info()).weight_version,
            routed_experts_start=item.request.routed_experts_start_len,
        )

    async def _generate(self, item: Item) -> GenerateOutput:
        if (ended := await self._ended(item)) is not None:
            return ended
        with self._state.registered(item.request.request_id):
            output = await self._state.engine.generate(item.request)
            # No await between the engine's return and this line: no cancellation can come between.
            self._take(output)
            return output

    async def _pump(self, item: Item, news: "_News") -> None:
        try:
            if (ended := await self._ended(item)) is not None:
                news.put(item, ended)
                return
            with self._state.registered(item.request.request_id):
                async for output in self._state.engine.stream(item.request):
                    if isinstance(output, GenerateOutput):
                        self._take(output)
                    news.put(item, output)
        except BaseException:
            news.put(item, None)
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

    async def _deliver(self, data: bytes, keys: Sequence[str], *, more_body: bool) -> None:
        """Send `data`; with its tail the client becomes the owner of the objects with these keys.

        A client without the tail has no whole JSON and so no reference: if it leaves before, deleting is
        safe. Once the tail went to the transport, nobody here can know whether it was read, so nothing is
        deleted any more.
        """
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
        """The server stops and waits no longer.

        A stream that has begun says so; else the connection ends without an answer, as that of a server that
        died: gateways and clients then ask another one.
        """
        if self._call.stream and self._started:
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
        elif self._call.stream:
            events = sse(error_body(error, self._renderer.openai)) + b"data: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": events, "more_body": False})
        else:
            # Half an answer is out; only an aborted connection tells the client that the rest will not come.
            raise error


async def _until_disconnected(receive: Receive) -> None:
    """The body was read already, so the next message is the client's leaving or the end of the response."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _keys(output: GenerateOutput) -> list[str]:
    """Of the object that an answer refers to."""
    return [] if output.output_store_ref is None else [output.output_store_ref.key]
