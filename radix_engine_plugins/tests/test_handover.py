"""Whose object is it? The ASGI side of an answer, with a store in memory."""

import asyncio
import json

import numpy as np
import pytest

from radix_engine_plugins.handover import HandoverMiddleware, Owned, http_receiver
from radix_engine_plugins.writer import OutputStoreWriter
from radix_transfer_plugins import TokenOutputStash


@pytest.fixture
async def writer(gated_store):
    writer = OutputStoreWriter(gated_store)
    yield writer
    await writer.close()


class Client:
    """The server's side of one connection. `leaves_after`: number of messages that it still receives."""

    def __init__(self, leaves_after: int | None = None) -> None:
        self.received = []
        self._leaves_after = leaves_after

    async def send(self, message) -> None:
        self.received.append(message)

    async def receive(self):
        if self._leaves_after is not None and len(self.received) >= self._leaves_after:
            return {"type": "http.disconnect"}
        await asyncio.sleep(60)
        raise AssertionError


async def serve(app, client: Client) -> None:
    await HandoverMiddleware(app)({"type": "http"}, client.receive, client.send)


async def store_one(writer: OutputStoreWriter) -> dict:
    """What a handler does: the object belongs to the request from here on."""
    ref = await writer.write(TokenOutputStash(routed_experts=np.zeros((1, 1, 2), np.int32)))
    receiver = http_receiver()
    assert receiver is not None
    receiver.add(ref, writer)
    return ref.to_builtins()


async def respond(send, *bodies: object) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for number, body in enumerate(bodies):
        more = number < len(bodies) - 1
        await send({"type": "http.response.body", "body": json.dumps(body).encode(), "more_body": more})


async def test_reference_whose_bytes_were_sent_is_the_clients(writer, gated_store):
    async def app(scope, receive, send):
        await respond(send, {"meta_info": {"output_store_ref": await store_one(writer)}})

    client = Client()
    await serve(app, client)
    await writer.close()
    assert len(gated_store.objects) == 1
    assert len(client.received) == 2


async def test_answer_that_lost_its_reference_leaves_nothing(writer, gated_store):
    async def app(scope, receive, send):
        await store_one(writer)
        await respond(send, {"error": "the answer could not be built"})

    await serve(app, Client())
    await writer.close()
    assert gated_store.objects == set()


async def test_handler_that_raises_leaves_nothing(writer, gated_store):
    async def app(scope, receive, send):
        await store_one(writer)
        raise KeyError("choices")

    with pytest.raises(KeyError):
        await serve(app, Client())
    await writer.close()
    assert gated_store.objects == set()


async def test_cancelled_request_leaves_nothing(writer, gated_store):
    stored = asyncio.Event()

    async def app(scope, receive, send):
        await store_one(writer)
        stored.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(serve(app, Client()))
    await stored.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await writer.close()
    assert gated_store.objects == set()


@pytest.mark.parametrize(("leaves_after", "kept"), [(0, 0), (2, 1), (3, 2), (None, 2)])
async def test_client_that_leaves_a_stream_owns_what_it_was_sent(writer, gated_store, leaves_after, kept):
    async def app(scope, receive, send):
        refs = [await store_one(writer) for _ in range(2)]
        await respond(send, *refs)

    await serve(app, Client(leaves_after))
    await writer.close()
    assert len(gated_store.objects) == kept


async def test_every_request_owns_its_own(writer, gated_store):
    async def app(scope, receive, send):
        ref = await store_one(writer)
        await asyncio.sleep(0.01)
        await respond(send, ref if scope.get("answers") else {})

    async def ask(answers: bool) -> None:
        client = Client()
        await HandoverMiddleware(app)({"type": "http", "answers": answers}, client.receive, client.send)

    await asyncio.gather(*(ask(number % 2 == 0) for number in range(10)))
    await writer.close()
    assert len(gated_store.objects) == 5


async def test_other_scopes_pass(writer):
    async def app(scope, receive, send):
        assert http_receiver() is None

    await HandoverMiddleware(app)({"type": "lifespan"}, None, None)


async def test_reference_handed_from_one_owner_to_the_next_is_discarded_by_the_last(writer, gated_store):
    ref = await writer.write(TokenOutputStash(routed_experts=np.zeros((1, 1, 2), np.int32)))
    first, second = Owned(), Owned()
    first.add(ref, writer)
    first.move(ref.key, to=second)
    first.discard_all()
    assert gated_store.objects == {ref.key}
    assert second
    second.discard_all()
    await writer.close()
    assert gated_store.objects == set()


async def test_reference_that_comes_after_the_request_ended_is_discarded_at_once(writer, gated_store):
    owned = Owned()
    owned.close()
    ref = await writer.write(TokenOutputStash(routed_experts=np.zeros((1, 1, 2), np.int32)))
    owned.add(ref, writer)
    assert ref.key not in owned
    await writer.close()
    assert gated_store.objects == set()
