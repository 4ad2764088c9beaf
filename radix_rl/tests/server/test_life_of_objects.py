"""Whatever ends a request, the store holds exactly the objects whose references were delivered."""

import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest

STORED = {"return_routed_experts": True, "return_outputs_via_store": True}


def _until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


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
    server.engine.unpaused.clear()
    sock = post_raw(text="ab", stream=stream, sampling_params={"n": 3}, **STORED)
    _until(lambda: len(server.engine.running) == 3)

    sock.close()

    _until(lambda: not server.engine.running)
    server.engine.unpaused.set()
    assert server.generate(text="a", sampling_params={"max_new_tokens": 1}).status_code == 200
    assert server.objects() == set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_decoding_ends_its_request(server, post_raw, stream):
    server.engine.step_s = 0.02
    sock = post_raw(text="ab", stream=stream, sampling_params={"max_new_tokens": 400}, **STORED)
    _until(lambda: server.engine.running)
    time.sleep(0.1)

    sock.close()

    _until(lambda: not server.engine.running)
    assert server.objects() == set()
    _until(
        lambda: 'radix_rl_requests_total{outcome="disconnected"} 1.0' in server.client.get("/metrics").text
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_storing_leaves_no_object(server, post_raw, store_gate, stream):
    sock = post_raw(text="ab", stream=stream, sampling_params={"max_new_tokens": 2}, **STORED)
    assert store_gate.entered.wait(10)

    sock.close()
    _until(lambda: not server.engine.running)
    store_gate.open.set()

    _until(lambda: server.writer.metrics.discards._value.get() == 1)
    assert server.objects() == set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_sibling_frees_the_objects_of_the_batch(server, stream):
    server.engine.step_s = 0.01
    server.engine.fail_ids.add("late")
    body = {"text": ["a", "b", "c"], "rid": ["x", "late", "y"], "stream": stream} | STORED
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 1, "min_new_tokens": 1}, {"max_new_tokens": 300}]

    response = server.generate(sampling_params=params, **body)

    events = [event for event in response.text.split("\n\n") if event]
    if stream and response.status_code == 200:
        delivered = {
            json.loads(event[6:])["meta_info"]["output_store_ref"]["key"]
            for event in events
            if "_ref" in event
        }
    else:
        assert response.status_code == 500
        delivered = set()
    _until(lambda: server.objects() == delivered)
    assert not server.engine.running


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_sample_of_a_prompt_frees_the_objects_of_the_others(server, stream):
    server.engine.step_s = 0.01
    server.engine.fail_ids.add("x_1")
    body = {"text": "a", "rid": "x", "stream": stream} | STORED

    response = server.generate(sampling_params={"n": 3, "max_new_tokens": 4}, **body)

    if not stream:
        assert response.status_code == 500
    events = [event for event in response.text.split("\n\n") if "_ref" in event]
    delivered = {json.loads(event[6:])["meta_info"]["output_store_ref"]["key"] for event in events}
    assert len(delivered) < 3
    _until(lambda: server.objects() == delivered)
    assert not server.engine.running


def test_an_answer_that_cannot_be_built_leaves_no_object(server, monkeypatch):
    def broken(*_, **__):
        raise KeyError("tokenizer file is damaged")

    monkeypatch.setattr("radix_rl.server.generation.renderer.final_text", broken)
    response = server.generate(text="ab", sampling_params={"n": 2, "max_new_tokens": 1}, **STORED)

    assert response.status_code == 500
    _until(lambda: server.writer.metrics.discards._value.get() == 2)
    assert server.objects() == set()


def test_an_abort_answers_with_what_there_is_and_its_rows(server):
    server.engine.step_s = 0.01
    answers = []
    body = {"text": ["a", "k"], "rid": "batch", "sampling_params": {"max_new_tokens": 400}} | STORED
    client = threading.Thread(target=lambda: answers.extend(server.generate(**body).json()))
    client.start()
    _until(lambda: len(server.engine.running) == 2)
    time.sleep(0.05)

    assert server.client.post("/abort_request", json={"rid": "batch"}).status_code == 200
    client.join(10)

    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort", "abort"]
    keys = {answer["meta_info"]["output_store_ref"]["key"] for answer in answers}
    assert server.objects() == keys
    rows = answers[0]["meta_info"]["output_store_ref"]["fields"]["routed_experts"]["shape"][0]
    assert rows == 1 + len(answers[0]["output_ids"]) - 1


def test_a_running_id_is_not_taken_twice(server, post_raw):
    server.engine.unpaused.clear()
    post_raw(text="a", rid="one", sampling_params={"max_new_tokens": 1})
    _until(lambda: server.engine.running)

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
        _until(lambda: server.engine.running)
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
        _until(lambda: server.engine.running)
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
