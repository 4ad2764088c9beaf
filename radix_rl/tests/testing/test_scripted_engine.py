"""What the scripted engine can do besides the contract: be held, and fail when it is told to."""

import asyncio

import pytest
import torch

from radix_rl.buckets.bucket import pack_buckets
from radix_rl.errors import EngineDeadError, EngineError, WeightUpdateError
from radix_rl.testing import Answer, ScriptedEngine, wait_for
from radix_rl.types import FinishReason, GenerateRequest, SamplingParams


def request(request_id: str) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, input_ids=(1,), sampling=SamplingParams(max_new_tokens=2))


async def test_held_requests_are_released_from_another_thread_and_ended_by_an_abort():
    engine = ScriptedEngine()
    engine.hold()
    tasks = [asyncio.create_task(engine.generate(request(name))) for name in ("released", "aborted")]
    await wait_for(lambda: len(engine.running) == 2, "both requests run")
    await engine.abort("aborted")
    assert (await tasks[1]).finish_reason.type == "abort"
    assert not tasks[0].done()
    await asyncio.to_thread(engine.release)
    assert (await asyncio.wait_for(tasks[0], 20)).output_ids == (2, 3)


async def test_a_release_does_not_end_a_pause():
    engine = ScriptedEngine()
    engine.hold()
    await engine.pause()
    task = asyncio.create_task(engine.generate(request("r")))
    await wait_for(lambda: engine.running, "the request runs")
    engine.release()
    await asyncio.sleep(0.02)
    assert not task.done()
    await engine.resume()
    assert (await asyncio.wait_for(task, 20)).output_ids == (2, 3)


async def test_failures_are_raised_from_now_on_and_those_of_a_list_once_each():
    engine = ScriptedEngine()
    engine.failures = {"generate": [EngineError("hiccup")], "health": EngineDeadError("gone")}
    with pytest.raises(EngineError, match="hiccup"):
        await engine.generate(request("r"))
    assert (await engine.generate(request("r"))).output_ids == (2, 3)
    assert len(engine.requests) == 2
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="gone"):
            await engine.health()


@pytest.mark.parametrize(("tokens", "rows"), [((), None), ((2,), 1)])
async def test_an_answer_aborted_before_its_first_token_has_no_rows(tokens, rows):
    aborted = Answer(output_ids=tokens, finish_reason=FinishReason(type="abort"))
    output = await ScriptedEngine(lambda _: aborted).generate(
        GenerateRequest(request_id="r", input_ids=(1,), return_routed_experts=True)
    )
    found = output.outputs and len(output.outputs.routed_experts)
    assert (output.finish_reason.type, found) == ("abort", rows)


async def test_a_refused_bucket_and_dropped_weights_end_the_update():
    engine = ScriptedEngine()
    (bucket,) = pack_buckets([("w", torch.ones(1))], 1 << 20)
    engine.failures["update_weights"] = [WeightUpdateError("'w' does not fit")]
    await engine.begin_weight_update("1")
    with pytest.raises(WeightUpdateError, match="does not fit"):
        await engine.update_weights(bucket)
    assert engine.staged is None

    await engine.begin_weight_update("2")
    await engine.sleep(["kv_cache"])
    assert engine.staged == {}
    await engine.sleep(["weights"])
    assert engine.staged is None
