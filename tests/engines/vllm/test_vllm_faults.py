"""Faults around one server: the client leaves, the store fails. Nothing is left behind."""

import threading
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
STORING_S = 5.0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
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
    faults(delay_s=STORING_S)
    begun, ended = puts_begun(), puts_ended()
    killed_client(server.url, path, {**ROUTES[path], "stream": stream}, lambda: puts_begun() > begun)
    wait_until(lambda: puts_ended() > ended)
    assert reader.is_empty_within(30), reader.keys()


def test_client_killed_while_decoding_leaves_nothing(
    server: Any,
    reader: Any,
    puts_begun: Callable[[], int],
    tokens_since: Callable,
    metric: Callable[[Any, str], float],
    killed_client: Callable[..., None],
    wait_until: Callable[..., None],
) -> None:
    before = puts_begun()
    generated = tokens_since(server)
    endless = {**ROUTES["/v1/completions"], "max_tokens": 400}
    killed_client(server.url, "/v1/completions", endless, lambda: generated() >= 3)
    wait_until(lambda: metric(server, "vllm:num_requests_running") == 0)
    # A request that ran to its end would have been put.
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
    assert reader.is_empty_within(30), reader.keys()


def test_failed_prompt_frees_the_objects_of_the_others(
    server: Any, reader: Any, faults: Callable[..., None], puts_begun: Callable[[], int]
) -> None:
    before = puts_begun()
    faults(error="StoreFullError", put=before + 2)
    body = {**ROUTES["/v1/completions"], "prompt": [[30, 31], [32, 33]]}
    assert server.post("/v1/completions", body, timeout=600).status_code == 500
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
    body = ROUTES["/v1/completions"]
    thread = threading.Thread(
        target=lambda: answers.append(server.post("/v1/completions", body, timeout=600).json())
    )
    thread.start()
    wait_until(lambda: puts_begun() > before)
    server.post("/v1/completions", {**body, "return_outputs_via_store": False, "max_tokens": 1}, timeout=600)
    assert not answers
    faults()
    thread.join(timeout=600)
    reader.take(answers[0])
