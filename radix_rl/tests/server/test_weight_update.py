"""`WeightUpdate`: whose tensors go into which update, and what a version is called."""

import asyncio

import msgspec
import pytest
import torch

from radix_rl.buckets.bucket import pack_buckets
from radix_rl.buckets.safetensors import encode_named_tensors
from radix_rl.buckets.wire import CONTENT_TYPE, encode_bucket
from radix_rl.errors import EngineStateError

(BUCKET,) = pack_buckets([("w", torch.ones(3))], 1 << 20)


def _post(server, path, **body):
    return server.client.post(path, json=body)


async def _send_slowly(app, head, rest, meanwhile):
    """Post a binary bucket in two parts with `meanwhile` between them; the status of the answer."""
    parts = [head, rest]
    statuses = []

    async def receive():
        if len(parts) == 1:
            await meanwhile()
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message):
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"content-type", CONTENT_TYPE.encode())]
    scope = {
        "type": "http", "method": "POST", "path": "/update_weights_from_tensor", "headers": headers,
        "query_string": b"",
    }  # fmt: skip
    await app(scope, receive, send)
    return statuses


async def test_tensors_of_an_update_that_was_dropped_do_not_get_into_the_next(asgi_exchange):
    update = asgi_exchange.app.state.weights.update
    body = encode_bucket(BUCKET)
    await update.begin("first")

    async def another_begins():
        await update.abort()
        await update.begin("second")

    assert await _send_slowly(asgi_exchange.app, body[:20], body[20:], another_begins) == [409]
    assert update.is_open
    assert await update.commit() == "second"


async def test_a_whole_update_that_was_dropped_does_not_end_the_next(asgi_exchange):
    update = asgi_exchange.app.state.weights.update

    async def whole_update():
        async with update.at_once("first", abort_requests=False, keep_pause=False) as number:
            await update.abort()
            await update.begin("second")
            await update.add(BUCKET, number)

    with pytest.raises(EngineStateError, match="dropped"):
        await whole_update()

    assert update.is_open


async def test_a_body_that_stops_coming_does_not_keep_others_from_sending(asgi_exchange):
    state = asgi_exchange.app.state.server
    state.settings = msgspec.structs.replace(state.settings, weight_update_timeout_s=0.05)
    update = asgi_exchange.app.state.weights.update
    await update.begin("1")
    body = encode_bucket(BUCKET)

    async def never():
        await asyncio.sleep(3600)

    assert await _send_slowly(asgi_exchange.app, body[:20], body[20:], never) == [400]
    assert not update.receiving.locked()


def test_after_the_weights_slept_an_update_that_nobody_names_keeps_the_last_name(embedded_server):
    parameters = embedded_server.engine._core_now().runner.model.named_parameters()
    text = encode_named_tensors({name: p.clone() for name, p in parameters})
    before = embedded_server.client.get("/model_info").json()["weight_version"]
    for path in ("/release_memory_occupation", "/release_memory_occupation", "/resume_memory_occupation"):
        assert _post(embedded_server, path).status_code == 200

    answer = _post(embedded_server, "/update_weights_from_tensor", serialized_named_tensors=[text])

    assert answer.json()["success"] is True, answer.text
    assert embedded_server.client.get("/model_info").json()["weight_version"] == before
