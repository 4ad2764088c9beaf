"""Whatever ends a request, the store holds exactly the objects whose references were delivered."""

import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from radix_rl.testing import wait_until

STORED = {"return_routed_experts": True, "return_outputs_via_store": True}


@pytest.fixture
def post_raw(server):
    """Send a /generate request on a socket of its own and return the socket."""
    sockets = []
    host, port = server.url.removeprefix("http://").split(":")

    def post(**body):
        data = json.dumps(body).encode()
        sock = socket.create_connection((host, int(port)))
        sockets.append(sock)
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        sock.sendall(head.encode() + data)
        return sock

    yield post
    for sock in sockets:
        sock.close()


@pytest.fixture
def store_gate(server, monkeypatch):
    """While `open` is not set, a put waits inside the store; `entered` tells that one does."""

    class Gate:
        entered = threading.Event()
        open = threading.Event()

    gate = Gate()
    put_many = server.writer._store.put_many

    def gated(*args, **options):
        gate.entered.set()
        assert gate.open.wait(30)
        return put_many(*args, **options)

    monkeypatch.setattr(server.writer._store, "put_many", gated)
    yield gate
    gate.open.set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_queued_ends_its_request(server, post_raw, stream):
    server.engine.hold()
    sock = post_raw(text="ab", stream=stream, sampling_params={"n": 3}, **STORED)
    wait_until(lambda: len(server.engine.running) == 3, "the samples run")

    sock.close()

    wait_until(lambda: not server.engine.running, "the requests have ended")
    server.engine.release()
    assert server.generate(text="a", sampling_params={"max_new_tokens": 1}).status_code == 200
    assert server.objects() == set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_decoding_ends_its_request(server, post_raw, stream):
    server.engine.step_s = 0.02
    sock = post_raw(text="ab", stream=stream, sampling_params={"max_new_tokens": 400}, **STORED)
    wait_until(lambda: server.engine.running, "the request runs")
    time.sleep(0.1)

    sock.close()

    wait_until(lambda: not server.engine.running, "the requests have ended")
    assert server.objects() == set()
    wait_until(
        lambda: 'radix_rl_requests_total{outcome="disconnected"} 1.0' in server.client.get("/metrics").text,
        "the request is counted as disconnected",
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_storing_leaves_no_object(server, post_raw, store_gate, stream):
    sock = post_raw(text="ab", stream=stream, sampling_params={"max_new_tokens": 2}, **STORED)
    assert store_gate.entered.wait(10)

    sock.close()
    wait_until(lambda: not server.engine.running, "the requests have ended")
    store_gate.open.set()

    wait_until(lambda: server.writer.metrics.discards._value.get() == 1, "the object is discarded")
    assert server.objects() == set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "fails"),
    [
        (
            {
                "text": ["a", "b", "c"],
                "rid": ["x", "late", "y"],
                "sampling_params": [{"max_new_tokens": count} for count in (1, 1, 300)],
            },
            "late",
        ),
        ({"text": "a", "rid": "x", "sampling_params": {"n": 3, "max_new_tokens": 4}}, "x_1"),
    ],
    ids=["prompts", "samples"],
)
def test_a_failing_sibling_frees_the_objects_of_the_others(server, stream, body, fails):
    server.engine.step_s = 0.01
    server.engine.fail_ids.add(fails)

    response = server.generate(stream=stream, **body, **STORED)

    if not stream:
        assert response.status_code == 500
    events = [event for event in response.text.split("\n\n") if "_ref" in event]
    delivered = {json.loads(event[6:])["meta_info"]["output_store_ref"]["key"] for event in events}
    assert len(delivered) < 3
    wait_until(lambda: server.objects() == delivered, "the store holds what was delivered")
    assert not server.engine.running


def test_an_answer_that_cannot_be_built_leaves_no_object(server, monkeypatch):
    def broken(*_, **__):
        raise KeyError("tokenizer file is damaged")

    monkeypatch.setattr("radix_rl.server.generation.renderer.final_text", broken)
    response = server.generate(text="ab", sampling_params={"n": 2, "max_new_tokens": 1}, **STORED)

    assert response.status_code == 500
    metrics = server.writer.metrics
    wait_until(
        lambda: 0 < metrics.puts._value.get() == metrics.discards._value.get() and not server.engine.running,
        "what was stored is discarded",
    )
    assert server.objects() == set()


def test_an_abort_answers_with_what_there_is_and_its_rows(server):
    server.engine.step_s = 0.01
    answers = []
    body = {"text": ["a", "k"], "rid": "batch", "sampling_params": {"max_new_tokens": 400}} | STORED
    client = threading.Thread(target=lambda: answers.extend(server.generate(**body).json()))
    client.start()
    wait_until(lambda: len(server.engine.running) == 2, "both requests run")
    time.sleep(0.05)

    assert server.client.post("/abort_request", json={"rid": "batch"}).status_code == 200
    client.join(10)

    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort", "abort"]
    keys = {answer["meta_info"]["output_store_ref"]["key"] for answer in answers}
    assert server.objects() == keys
    rows = answers[0]["meta_info"]["output_store_ref"]["fields"]["routed_experts"]["shape"][0]
    assert rows == 1 + len(answers[0]["output_ids"]) - 1


def test_a_running_id_is_not_taken_twice(server, post_raw):
    server.engine.hold()
    post_raw(text="a", rid="one", sampling_params={"max_new_tokens": 1})
    wait_until(lambda: server.engine.running, "the request runs")

    response = server.generate(text="a", rid="one")

    assert response.status_code == 400
    assert "'one' is running already" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_leaves_no_object_of_unfinished_requests(run_server, stream, caplog):
    """The client sees what it would of a server that died, and so asks another one; a stream tells why."""
    ends: list[Any] = []

    def wait_for_answer(server):
        try:
            sampling = {"max_new_tokens": 500}
            ends.append(server.generate(text="ab", stream=stream, sampling_params=sampling, **STORED))
        except httpx.RemoteProtocolError as error:
            ends.append(error)

    with run_server() as server:
        server.engine.step_s = 0.05
        client = threading.Thread(target=wait_for_answer, args=(server,))
        client.start()
        wait_until(lambda: server.engine.running, "the request runs")
    client.join(10)

    (end,) = ends
    if stream:
        assert "the server stopped before this answer was complete" in end.text
        assert "output_store_ref" not in end.text
    else:
        assert isinstance(end, httpx.RemoteProtocolError), end
    assert not server.engine.running
    assert server.objects() == set()
    assert "Traceback" not in caplog.text


def test_a_server_that_stops_still_answers_what_ends_in_time(run_server):
    answers = []
    with run_server() as server:
        server.engine.step_s = 0.02
        body = {"text": "ab", "sampling_params": {"max_new_tokens": 20}} | STORED
        client = threading.Thread(target=lambda: answers.append(server.generate(**body).json()))
        client.start()
        wait_until(lambda: server.engine.running, "the request runs")
    client.join(10)

    assert answers[0]["meta_info"]["completion_tokens"] == 20
    assert server.objects() == {answers[0]["meta_info"]["output_store_ref"]["key"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_send_that_fails_at_any_message_leaves_no_object(asgi_exchange, stream):
    sent = await asgi_exchange.run(stream=stream)
    assert await asgi_exchange.num_objects() == 1
    await asgi_exchange.clear()

    for failing in range(len(sent)):
        with pytest.raises(ConnectionResetError):
            await asgi_exchange.run(stream=stream, fail_at=failing)
        # Only the last message of a stream comes after the event with the reference.
        delivered = _complete(asgi_exchange.wire(sent[:failing]))
        assert delivered == (stream and failing == len(sent) - 1)
        assert await asgi_exchange.num_objects() == int(delivered), f"message {failing} of {len(sent)}"
        await asgi_exchange.clear()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_after_any_message_and_before_the_tail_leaves_no_object(
    asgi_exchange, stream
):
    sent = await asgi_exchange.run(stream=stream)
    await asgi_exchange.clear()

    for leaving in range(len(sent)):
        told = await asgi_exchange.run(stream=stream, leave_after=leaving)
        assert len(told) <= len(sent)
        assert await asgi_exchange.num_objects() == int(_complete(asgi_exchange.wire(told))), (
            f"message {leaving}"
        )
        await asgi_exchange.clear()


def _complete(wire: bytes) -> bool:
    """Whether some event or the whole body is JSON with a reference in it."""
    for part in wire.split(b"\n\n"):
        try:
            if "output_store_ref" in json.loads(part.removeprefix(b"data: "))["meta_info"]:
                return True
        except ValueError:
            continue
    return False
