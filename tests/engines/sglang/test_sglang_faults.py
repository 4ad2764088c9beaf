"""Faults around one server: the client leaves, the store fails. Nothing is left
behind.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

BODY = {
    "input_ids": list(range(30, 60)),
    "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
    "return_routed_experts": True,
    "return_outputs_via_store": True,
}
STORING_S = 2.0
"""How long a delayed put takes; requests themselves take milliseconds."""


def killed_client(url: str, path: str, body: dict[str, Any], after_s: float) -> None:
    """A process of its own that sends a request and is killed while it waits for the answer."""
    host, port = url.removeprefix("http://").split(":")
    program = f"""
import json, socket, time
body = json.dumps({body!r}).encode()
s = socket.create_connection(({host!r}, {port}))
head = ["POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {{len(body)}}"]
s.sendall("\\r\\n".join([*head, "", ""]).encode() + body)
print("sent", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(after_s)
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_client_killed_while_storing_leaves_nothing(
    server: Any, reader: Any, faults: Callable[..., None], path: str, stream: bool
) -> None:
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "ignore_eos": True,
    }
    opt_in = {"return_routed_experts": True, "return_outputs_via_store": True}
    body = {**(BODY if path == "/generate" else {**chat, **opt_in}), "stream": stream}
    faults(delay_s=STORING_S)
    killed_client(server.url, path, body, after_s=STORING_S / 2)
    time.sleep(STORING_S)
    assert reader.is_empty_within(5), reader.keys()
    faults()
    reader.take(server.generate(BODY)["meta_info"])


def test_client_killed_while_decoding_leaves_nothing(server: Any, reader: Any) -> None:
    endless = {**BODY, "sampling_params": {"max_new_tokens": 3900, "temperature": 0, "ignore_eos": True}}
    killed_client(server.url, "/generate", endless, after_s=1.0)
    # The server looks for clients that left once a second (SGLANG_REQUEST_STATE_WAIT_TIMEOUT).
    time.sleep(3)
    assert reader.is_empty_within(5), reader.keys()


@pytest.mark.parametrize(
    ("error", "text"), [("StoreFullError", "StoreFullError"), ("StoreUnavailableError", "injected")]
)
def test_failed_put_fails_the_request_and_never_answers_inline(
    server: Any, reader: Any, faults: Callable[..., None], error: str, text: str
) -> None:
    faults(error=error)
    response = server.post("/generate", BODY)
    assert response.status_code == 500
    assert "could not be stored" in response.text
    assert text in response.text
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    chat_response = server.post(
        "/v1/chat/completions", {**chat, "return_routed_experts": True, "return_outputs_via_store": True}
    )
    assert chat_response.status_code == 500
    assert "could not be stored" in chat_response.text
    inline = server.generate({**BODY, "return_outputs_via_store": False})
    assert "routed_experts" in inline["meta_info"]
    assert reader.is_empty_within(5)


def test_failed_put_ends_a_stream_with_an_error_chunk(
    server: Any, reader: Any, faults: Callable[..., None]
) -> None:
    faults(error="StoreFullError")
    chunks = server.stream("/generate", BODY)
    assert chunks[-1]["error"]["code"] == 500
    assert "could not be stored" in chunks[-1]["error"]["message"]
    assert reader.is_empty_within(5)


def test_failed_sibling_frees_the_objects_of_the_others(
    server: Any, reader: Any, faults: Callable[..., None]
) -> None:
    """The first two items finish and are stored at once, the third finishes later, when puts fail."""
    short, long = {"max_new_tokens": 1, "ignore_eos": True}, {"max_new_tokens": 1500, "ignore_eos": True}
    body = {**BODY, "input_ids": [BODY["input_ids"]] * 3, "sampling_params": [short, short, long]}
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.post("/generate", body)))
    thread.start()
    deadline = time.monotonic() + 30
    while len(reader.keys()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(reader.keys()) == 2
    faults(error="StoreFullError")
    thread.join(timeout=120)
    assert answers[0].status_code == 500
    assert reader.is_empty_within(5), reader.keys()


def test_others_are_served_while_a_put_waits(server: Any, reader: Any, faults: Callable[..., None]) -> None:
    faults(delay_s=STORING_S)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.generate(BODY)))
    thread.start()
    time.sleep(STORING_S / 4)
    started = time.monotonic()
    server.generate({**BODY, "return_outputs_via_store": False})
    assert time.monotonic() - started < STORING_S / 2
    assert not answers
    thread.join(timeout=30)
    reader.take(answers[0]["meta_info"])
