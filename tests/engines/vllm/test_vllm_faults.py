"""Faults around one server: the client leaves, the store fails. Nothing is left behind."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

SAMPLING = {"max_tokens": 2, "temperature": 1.0, "top_k": 5, "ignore_eos": True}
OPT_IN = {"return_outputs_via_store": True}
ROUTES = {
    "/v1/completions": {"model": "tiny", "prompt": [30, 31, 32], **SAMPLING, **OPT_IN},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        **SAMPLING,
        **OPT_IN,
    },
    "/inference/v1/generate": {"token_ids": [30, 31, 32], "sampling_params": SAMPLING, **OPT_IN},
}
STORING_S = 3.0


def killed_client(url: str, path: str, body: dict[str, Any], kill_when: Callable[[], bool]) -> None:
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
    try:
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 300
        while not kill_when():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_client_killed_while_storing_leaves_nothing(
    server: Any,
    reader: Any,
    faults: Callable[..., None],
    puts_begun: Callable[[], int],
    path: str,
    stream: bool,
) -> None:
    faults(delay_s=STORING_S)
    before = puts_begun()
    killed_client(server.url, path, {**ROUTES[path], "stream": stream}, lambda: puts_begun() > before)
    time.sleep(STORING_S)
    assert reader.is_empty_within(20), reader.keys()


def test_client_killed_while_decoding_leaves_nothing(
    server: Any, reader: Any, puts_begun: Callable[[], int]
) -> None:
    before = puts_begun()
    endless = {**ROUTES["/v1/completions"], "max_tokens": 400}
    started = time.monotonic()
    killed_client(server.url, "/v1/completions", endless, lambda: time.monotonic() - started > 3)
    # The server answers a later request, so it has ended the other one.
    answer = server.post("/v1/completions", ROUTES["/v1/completions"], timeout=600).json()
    reader.take(answer)
    assert puts_begun() == before + 1


@pytest.mark.parametrize("path", ROUTES)
def test_failed_put_fails_the_request_and_never_answers_inline(
    server: Any, reader: Any, faults: Callable[..., None], path: str
) -> None:
    faults(error="StoreFullError")
    response = server.post(path, ROUTES[path], timeout=600)
    assert response.status_code == 500
    assert "could not be stored" in response.text
    assert "StoreFullError" in response.text
    chunks = server.stream(path, ROUTES[path])
    assert chunks[-1]["error"]["code"] == 500
    assert "could not be stored" in chunks[-1]["error"]["message"]


def test_failed_sample_frees_the_object_of_the_other(
    server: Any, reader: Any, faults: Callable[..., None], puts_begun: Callable[[], int]
) -> None:
    before = puts_begun()
    faults(error="StoreFullError", put=before + 2)
    response = server.post("/v1/completions", {**ROUTES["/v1/completions"], "n": 2}, timeout=600)
    assert response.status_code == 500
    # Both were put together, or one after the other; after a failure each is put again, alone.
    assert puts_begun() >= before + 2
    assert reader.is_empty_within(20), reader.keys()


def test_failed_prompt_frees_the_objects_of_the_others(
    server: Any, reader: Any, faults: Callable[..., None], puts_begun: Callable[[], int]
) -> None:
    before = puts_begun()
    faults(error="StoreFullError", put=before + 2)
    body = {**ROUTES["/v1/completions"], "prompt": [[30, 31], [32, 33]]}
    assert server.post("/v1/completions", body, timeout=600).status_code == 500
    assert reader.is_empty_within(20), reader.keys()


def test_others_are_served_while_a_put_waits(
    server: Any, reader: Any, faults: Callable[..., None], puts_begun: Callable[[], int]
) -> None:
    faults(delay_s=20)
    before = puts_begun()
    answers: list[Any] = []
    body = ROUTES["/v1/completions"]
    thread = threading.Thread(
        target=lambda: answers.append(server.post("/v1/completions", body, timeout=600).json())
    )
    thread.start()
    while puts_begun() == before:
        time.sleep(0.05)
    server.post("/v1/completions", {**body, "return_outputs_via_store": False, "max_tokens": 1}, timeout=600)
    assert not answers
    thread.join(timeout=600)
    reader.take(answers[0])
