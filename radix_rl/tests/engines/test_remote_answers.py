"""The remote engine against answers of servers that go wrong, or differ from ours."""

import asyncio
import base64
import time

import httpx
import msgspec
import numpy as np
import pytest

from radix_rl.config.engine import RemoteSettings
from radix_rl.engines.remote import client as http_client
from radix_rl.engines.remote.engine import RemoteEngine
from radix_rl.engines.remote.liveness import LivenessWatch
from radix_rl.engines.remote.retry import RetryPolicy
from radix_rl.engines.remote.weights import RemoteWeights
from radix_rl.errors import (
    ConfigurationError,
    EngineDeadError,
    EngineError,
    EngineStateError,
    ReplayError,
    RequestError,
)
from radix_rl.server.runner import bind
from radix_rl.types import LOGPROB_FLOOR


def answering(body: dict, status: int = 200) -> RemoteEngine:
    """A client of a server that gives one answer to everything."""
    content = msgspec.json.encode(body)
    headers = {"content-type": "application/json"}
    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=content, headers=headers))
    return RemoteEngine("http://stand-in", RemoteSettings(), transport=transport)


def sglang_answer(**meta) -> dict:
    rows = np.zeros((6, 2, 2), "<i4")
    return {
        "output_ids": [5, 6, 7],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "weight_version": "default",
            "output_token_logprobs": [[-0.5, 5, None], [-0.5, 6, None], [-0.5, 7, None]],
            "routed_experts": base64.b64encode(rows.tobytes()).decode(),
        }
        | meta,
    }


async def test_a_malformed_reference_is_refused_where_it_enters(request_for):
    engine = answering(sglang_answer(output_store_ref={"version": 99}, routed_experts=None))
    with pytest.raises(ReplayError, match="output_store_ref is not usable: unknown version 99"):
        await engine.generate(request_for(return_routed_experts=True, return_outputs_via_store=True))
    await engine.close()


async def test_rows_without_a_shape_are_refused_not_guessed(request_for):
    engine = answering(sglang_answer())
    with pytest.raises(ReplayError, match=r"does not tell layers and top-k.*experts_per_token"):
        await engine.generate(request_for(return_routed_experts=True))
    await engine.close()


@pytest.mark.parametrize(
    ("shape", "rows", "complaint"),
    [
        ([6, 2, 3], base64.b64encode(bytes(100)).decode(), "100 bytes, expected whole rows of 2 layers x 3"),
        ([6, 5, 1], base64.b64encode(bytes(96)).decode(), "96 bytes, expected whole rows of 5 layers x 1"),
        ([6, 2, 2], "@@@", "not base64"),
    ],
)
async def test_rows_that_do_not_fit_their_shape_are_refused(request_for, shape, rows, complaint):
    engine = answering(sglang_answer(routed_experts=rows, routed_experts_shape=shape))
    with pytest.raises(ReplayError, match=complaint):
        await engine.generate(request_for(return_routed_experts=True))
    await engine.close()


@pytest.mark.parametrize(
    "body", [{}, {"output_ids": [1]}, {"output_ids": 3, "meta_info": {}}, {"meta_info": None}]
)
async def test_an_answer_of_another_shape_is_an_engine_error(request_for, body):
    engine = answering(body)
    with pytest.raises(EngineError, match="not of SGLang's shape"):
        await engine.generate(request_for())
    await engine.close()


async def test_null_for_a_log_probability_that_is_not_finite_is_the_floor(request_for):
    body = {
        "output_ids": [5, 6],
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "length"},
            "prompt_tokens": 4,
            "cached_tokens": 0,
            "weight_version": "0",
            "output_token_logprobs": [[-0.5, 5, None], [None, 6, None]],
        },
    }
    engine = answering(body)
    answer = await engine.generate(request_for())
    assert answer.output_logprobs == (-0.5, LOGPROB_FLOOR)
    await engine.close()


SGLANG_SERVER = {
    "enable_return_routed_experts": True,
    "enable_return_indexer_topk": False,
    "sampling_mask_max_tokens": 1024,
    "sampling_backend": "flashinfer",
    "disaggregation_mode": "null",
    "speculative_algorithm": None,
}


@pytest.mark.parametrize(
    ("changes", "masks"),
    [
        ({}, True),
        ({"speculative_algorithm": "DFLASH"}, True),
        ({"speculative_algorithm": "EAGLE3"}, False),
        ({"disaggregation_mode": "decode"}, False),
        ({"sampling_backend": "ascend"}, False),
        ({"sampling_mask_max_tokens": None}, False),
    ],
)
async def test_sampling_masks_are_what_sglang_tells_of_itself(changes, masks):
    def answer(request: httpx.Request) -> httpx.Response:
        model = {"model_path": "m", "weight_version": "default"}
        return httpx.Response(
            200, json={"/server_info": {**SGLANG_SERVER, **changes}}.get(request.url.path, model)
        )

    engine = RemoteEngine("http://sglang", RemoteSettings(), transport=httpx.MockTransport(answer))
    await engine.start()
    assert engine.capabilities.sampling_mask is masks
    assert engine.capabilities.routed_experts
    assert not engine.capabilities.indexer_topk
    await engine.close()


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, RequestError), (404, ConfigurationError), (409, EngineStateError), (422, RequestError)],
)
async def test_statuses_become_errors_with_the_servers_words(request_for, status, error):
    engine = answering({"error": {"message": "its own words"}}, status)
    with pytest.raises(error, match="its own words"):
        await engine.generate(request_for())
    await engine.close()


async def test_a_server_that_stops_answering_is_noticed_by_probes(request_for):
    async def hang(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/model_info":
            raise httpx.ConnectError("refused")
        await asyncio.sleep(60)
        raise AssertionError

    engine = RemoteEngine("http://stand-in", RemoteSettings(), transport=httpx.MockTransport(hang))
    engine._http.watch = LivenessWatch(engine._http._require_answer, interval_s=0.02, max_failures=3)
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match="3 failed probes: no connection"):
        await engine.generate(request_for())
    assert time.monotonic() - started < 5
    await engine.close()


@pytest.mark.parametrize("status", [401, 404, 429])
async def test_a_probe_that_is_refused_is_answered_and_not_the_last_one(request_for, status):
    answers = iter([httpx.Response(status)])

    async def refuse_once(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/model_info":
            if (answer := next(answers, None)) is not None:
                return answer
            raise httpx.ConnectError("refused")
        await asyncio.sleep(60)
        raise AssertionError

    engine = RemoteEngine("http://stand-in", RemoteSettings(), transport=httpx.MockTransport(refuse_once))
    engine._http.watch = LivenessWatch(engine._http._require_answer, interval_s=0.02, max_failures=3)
    with pytest.raises(EngineDeadError, match="3 failed probes: no connection"):
        await asyncio.wait_for(engine.generate(request_for()), 10)
    await engine.close()


@pytest.fixture
async def frozen():
    """URL of a server that takes connections, as the kernel does for a stopped process, and never answers."""
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.pause("in_place"),
        lambda engine: engine.sleep(),
        lambda engine: RemoteWeights(engine._http, {"server": "radix-rl"}).begin("1"),
        lambda engine: RemoteWeights(engine._http, {}).send_encoded(b"bucket"),
    ],
    ids=["pause", "sleep", "begin", "bucket"],
)
async def test_control_calls_to_a_frozen_server_end(frozen, monkeypatch, call):
    monkeypatch.setattr(http_client, "PROBE", RetryPolicy(max_tries=1, deadline_s=0.1))
    engine = RemoteEngine(frozen, RemoteSettings())
    engine._http.watch = LivenessWatch(engine._http._require_answer, interval_s=0.02, max_failures=2)
    with pytest.raises(EngineDeadError, match=r"2 failed probes: .*/model_info did not answer"):
        await asyncio.wait_for(call(engine), 10)
    await engine.close()


async def test_a_probe_that_fails_once_does_not_end_a_request():
    failures = iter([EngineDeadError("slow"), None, EngineDeadError("slow"), None])

    async def probe() -> None:
        error = next(failures, None)
        if error is not None:
            raise error

    watch = LivenessWatch(probe, interval_s=0.01, max_failures=2)
    call = asyncio.create_task(asyncio.sleep(0.2, "done"))
    assert await watch.guard(call) == "done"


async def test_a_pause_whose_answer_was_lost_is_undone():
    paths: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        if request.url.path == "/pause_generation":
            await asyncio.sleep(60)
        return httpx.Response(200)

    engine = RemoteEngine("http://server", RemoteSettings(), transport=httpx.MockTransport(answer))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.pause(), 0.05)
    await engine.resume()
    await engine.close()

    assert paths == ["/pause_generation", "/continue_generation"]


async def test_a_pause_that_was_refused_is_not_undone():
    """It is somebody else's."""
    paths: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return httpx.Response(409, json={"error": {"message": "paused already"}})

    engine = RemoteEngine("http://server", RemoteSettings(), transport=httpx.MockTransport(answer))
    with pytest.raises(EngineStateError):
        await engine.pause()
    await engine.resume()
    await engine.close()

    assert paths == ["/pause_generation"]
