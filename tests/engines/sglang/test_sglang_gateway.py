"""In front of servers: the stock router drops what it does not know, HAProxy forwards it."""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from radix_rl.engines.remote.api import generate_body, parse_answer
from radix_rl.errors import ReplayError
from radix_rl.launch.gateway import Gateway, GatewaySettings, require_output_store
from radix_rl.rollout.replay_index import ReplayIndex
from radix_rl.types import GenerateRequest, SamplingParams

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

BODY = {
    "input_ids": list(range(30, 60)),
    "sampling_params": {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True},
    "return_routed_experts": True,
    "return_outputs_via_store": True,
}


def test_answer_that_the_stock_router_stripped_is_an_error_naming_the_router(
    server: Any, reader: Any, sglang_python: str, start_process: Callable[..., Any], port: Callable[[], int]
) -> None:
    """It drops the opt-in, and what else it does not know."""
    request = GenerateRequest(
        request_id="routed",
        input_ids=tuple(BODY["input_ids"]),
        sampling=SamplingParams(max_new_tokens=4, temperature=0, ignore_eos=True),
        return_routed_experts=True,
        return_outputs_via_store=True,
    )
    body = generate_body(request, "routed")
    listen = port()
    command = [sglang_python, "-m", "sglang_router.launch_router", "--worker-urls", server.url]
    command += ["--host", "127.0.0.1", "--port", str(listen), "--prometheus-port", str(port())]
    router = start_process(command, f"http://127.0.0.1:{listen}")
    router.wait_until_healthy()
    deadline = time.monotonic() + 120
    response = router.post("/generate", body)
    while response.status_code == 503 and time.monotonic() < deadline:
        time.sleep(1)
        response = router.post("/generate", body)
    router.stop()
    assert response.status_code == 200, response.text
    answer = response.json()
    output = parse_answer(request, answer[0] if isinstance(answer, list) else answer, {})
    assert output.output_store_ref is None
    with pytest.raises(ReplayError, match="router"):
        ReplayIndex().add_response(request, output, store_backend="faulty")


@pytest.fixture(scope="module")
def second_server(server: Any, start_store_server: Callable[..., Any]) -> Iterator[Any]:
    with start_store_server() as second:
        yield second


def test_opting_in_without_capture_names_the_missing_flag(second_server: Any) -> None:
    response = second_server.post("/generate", {**BODY, "return_indexer_topk": True})
    assert response.status_code == 400
    assert "--enable-return-indexer-topk" in response.text


@pytest.fixture
def gateway(server: Any, second_server: Any, port: Callable[[], int]) -> Iterator[Gateway]:
    urls = (server.url, second_server.url)
    require_output_store(urls)
    gateway = Gateway(GatewaySettings(urls=urls, port=port(), drain_s=30))
    deadline = time.monotonic() + 30
    while not all(gateway.is_up(url) for url in urls):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    yield gateway
    gateway.stop()


def ask(gateway: Gateway) -> dict[str, Any]:
    response = httpx.post(f"{gateway.url}/generate", json=BODY, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()["meta_info"]


def test_request_waits_while_every_server_is_paused(
    gateway: Gateway, server: Any, second_server: Any, reader: Any, wait_until: Callable[..., None]
) -> None:
    servers = (server, second_server)
    with ThreadPoolExecutor() as pool:
        try:
            for each in servers:
                assert each.post("/pause_generation", {"mode": "retract"}).status_code == 200
            wait_until(lambda: not any(gateway.is_up(each.url) for each in servers))
            waiting = pool.submit(ask, gateway)
            time.sleep(1)
            assert not waiting.done()
        finally:
            for each in servers:
                assert each.post("/continue_generation", {}).status_code == 200
        reader.take(waiting.result())
    wait_until(lambda: all(gateway.is_up(each.url) for each in servers))


def test_references_arrive_and_none_is_lost_when_a_server_is_killed(
    gateway: Gateway, second_server: Any, reader: Any
) -> None:
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(ask, gateway) for _ in range(48)]
        while sum(future.done() for future in futures) < 12:
            time.sleep(0.05)
        second_server.stop(first=signal.SIGKILL)
        answers = [future.result() for future in futures]
    assert len({meta_info["output_store_ref"]["key"] for meta_info in answers}) == 48
    for meta_info in answers:
        reader.take(meta_info)
    # What the killed server had stored but not answered: found by prefix and age, as after any crash.
    reader.store.delete_objects(older_than_s=0)
