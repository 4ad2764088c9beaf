"""Faults around one server: the client leaves, the store fails.

Nothing is left behind.
"""

import threading
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
STORING_S = 5.0
"""How long a delayed put takes; requests themselves take milliseconds."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_client_killed_while_storing_leaves_nothing(
    server: Any,
    reader: Any,
    faults: Callable[..., None],
    puts_begun: Callable[[], int],
    puts_ended: Callable[[], int],
    killed_client: Callable[..., None],
    wait_until: Callable[..., None],
    path: str,
    stream: bool,
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
    begun, ended = puts_begun(), puts_ended()
    killed_client(server.url, path, body, lambda: puts_begun() > begun)
    wait_until(lambda: puts_ended() > ended)
    assert reader.is_empty_within(30), reader.keys()
    faults()
    reader.take(server.generate(BODY)["meta_info"])


def test_client_killed_while_decoding_leaves_nothing(
    server: Any,
    reader: Any,
    puts_begun: Callable[[], int],
    num_running: Callable[[Any], int],
    killed_client: Callable[..., None],
    wait_until: Callable[..., None],
) -> None:
    before = puts_begun()
    wait_until(lambda: num_running(server) == 0)
    endless = {**BODY, "sampling_params": {"max_new_tokens": 3900, "temperature": 0, "ignore_eos": True}}
    killed_client(server.url, "/generate", endless, lambda: num_running(server) == 1)
    # The server looks for clients that left once a second (SGLANG_REQUEST_STATE_WAIT_TIMEOUT).
    wait_until(lambda: num_running(server) == 0)
    reader.take(server.generate(BODY)["meta_info"])
    assert puts_begun() == before + 1


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
    assert reader.is_empty_within(30)


def test_failed_put_ends_a_stream_with_an_error_chunk(
    server: Any, reader: Any, faults: Callable[..., None]
) -> None:
    faults(error="StoreFullError")
    chunks = server.stream("/generate", BODY)
    assert chunks[-1]["error"]["code"] == 500
    assert "could not be stored" in chunks[-1]["error"]["message"]
    assert reader.is_empty_within(30)


def test_failed_sibling_frees_the_objects_of_the_others(
    server: Any, reader: Any, faults: Callable[..., None], wait_until: Callable[..., None]
) -> None:
    """The first two items finish and are stored at once, the third finishes later, when puts fail."""
    short, long = {"max_new_tokens": 1, "ignore_eos": True}, {"max_new_tokens": 1500, "ignore_eos": True}
    body = {**BODY, "input_ids": [BODY["input_ids"]] * 3, "sampling_params": [short, short, long]}
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.post("/generate", body)))
    thread.start()
    wait_until(lambda: len(reader.keys()) == 2, 30)
    faults(error="StoreFullError")
    thread.join(timeout=120)
    assert answers[0].status_code == 500
    assert reader.is_empty_within(30), reader.keys()


def test_others_are_served_while_a_put_waits(
    server: Any,
    reader: Any,
    faults: Callable[..., None],
    puts_begun: Callable[[], int],
    wait_until: Callable[..., None],
) -> None:
    faults(hold=True)
    before = puts_begun()
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.generate(BODY)))
    thread.start()
    wait_until(lambda: puts_begun() > before)
    server.generate({**BODY, "return_outputs_via_store": False})
    assert not answers
    faults()
    thread.join(timeout=30)
    reader.take(answers[0]["meta_info"])
