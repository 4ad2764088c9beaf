"""Keys, values and log-probabilities that are not finite: they harm nobody but their own request."""

import asyncio

import numpy as np
import pytest
import torch

from radix_rl.engines.embedded.core import EngineCore


async def test_a_request_that_is_not_finite_spoils_no_other(qwen3_moe, engine_of, prompt, request_of):
    bad = 127
    clean = [tuple(token % bad for token in prompt(length, length)) for length in (10, 20, 12, 33)]
    poisoned = (*clean[3], bad, *clean[1])
    with torch.no_grad():
        qwen3_moe.model.embed_tokens.weight[bad] = float("nan")
        qwen3_moe.lm_head.weight[bad] = 0.0
    async with engine_of(qwen3_moe) as engine:

        async def greedy(name: str, ids: tuple[int, ...], count: int):
            return await engine.generate(request_of(name, ids, max_new_tokens=count, temperature=0.0))

        expected = [await greedy(f"alone-{i}", ids, 8) for i, ids in enumerate(clean)]
        # It never lets the engine become idle, so that slots pass from one request to the next.
        keeper = asyncio.create_task(greedy("keeper", clean[0], 220))
        for turn in range(4):
            broken = asyncio.create_task(greedy(f"bad-{turn}", poisoned, 6))
            short = asyncio.create_task(greedy(f"short-{turn}", clean[2], 3))
            assert (await broken).output_logprobs == (-9999.0,) * 6
            await short
            got = await asyncio.gather(*(greedy(f"{turn}-{i}", ids, 8) for i, ids in enumerate(clean)))
            assert [output.output_ids for output in got] == [output.output_ids for output in expected]
        assert not keeper.done()
        assert np.isfinite((await keeper).output_logprobs).all()
        assert min((await greedy("after", clean[3], 8)).output_logprobs) > -9999.0


@pytest.mark.parametrize("end", ["no tokens asked", "abort between chunks", "cached prefix"])
async def test_what_is_not_finite_and_was_never_sampled_spoils_no_other(
    qwen3_moe, engine_of, prompt, request_of, end
):
    bad = 127
    clean = [tuple(token % bad for token in prompt(length, length)) for length in (4, 50)]
    with torch.no_grad():
        qwen3_moe.model.embed_tokens.weight[bad] = float("nan")
        qwen3_moe.lm_head.weight[bad] = 0.0
    poisoned = (*clean[0], *(bad,) * 56)

    async def greedy(engine, name: str, ids: tuple[int, ...]):
        return await engine.generate(request_of(name, ids, max_new_tokens=8, temperature=0.0))

    async with engine_of(qwen3_moe) as engine:
        expected = [(await greedy(engine, f"{i}", ids)).output_ids for i, ids in enumerate(clean)]
    async with engine_of(
        qwen3_moe, chunked_prefill_tokens=16, prefix_cache_tokens=200 if end == "cached prefix" else 0
    ) as engine:
        tokens = 0 if end == "no tokens asked" else 5
        keeper = None
        if end == "cached prefix":
            # An engine without requests would forget it.
            ids = clean[1][::-1]
            keeper = asyncio.create_task(engine.generate(request_of("keeper", ids, max_new_tokens=200)))
            while not (await engine.stats()).generated_tokens:
                await asyncio.sleep(0)
        await engine.pause("in_place")
        running = asyncio.create_task(engine.generate(request_of("bad", poisoned, max_new_tokens=tokens)))
        while not (await engine.stats()).num_waiting:
            await asyncio.sleep(0)
        if end == "abort between chunks":
            for _ in range(2):
                await engine._call(EngineCore.step)
            await engine.abort()
        await engine.resume()
        assert (await running).finish_reason.type == ("abort" if "abort" in end else "length")
        # Beside a longer one the short one sees masked positions of its slot.
        got = await asyncio.gather(*[greedy(engine, f"{i}", ids) for i, ids in enumerate(clean)])
        assert [output.output_ids for output in got] == expected
        continued = await greedy(engine, "continued", (*clean[0], *clean[1]))
        assert min(continued.output_logprobs) > -9999.0
        if keeper is not None:
            assert not keeper.done()
            await keeper


async def test_non_finite_logprob_becomes_the_floor_and_is_counted(qwen3_moe, engine_of, prompt, request_of):
    async with engine_of(qwen3_moe) as engine:
        expected = await engine.generate(request_of("x", prompt(20, 2), max_new_tokens=4, temperature=0.0))
        weight = engine._core_now().runner.model.lm_head.weight
        good = weight.clone()
        weight.fill_(float("nan"))
        broken = await engine.generate(request_of("a", prompt(20, 2), max_new_tokens=4))
        weight.copy_(good)
        # The next request in the slot is not spoiled by what the broken one cached there.
        layer = engine._core_now().runner.model.model.layers[0].self_attn.v_proj.weight
        good_layer = layer.clone()
        layer.fill_(float("nan"))
        await engine.generate(request_of("b", prompt(90, 2), max_new_tokens=4))
        layer.copy_(good_layer)
        mended = await engine.generate(request_of("c", prompt(20, 2), max_new_tokens=4, temperature=0.0))
        stats = await engine.stats()
    assert broken.output_logprobs == (-9999.0,) * 4
    assert np.isfinite(broken.output_logprobs).all()
    assert stats.non_finite_logprobs == 8
    assert mended.output_ids == expected.output_ids
