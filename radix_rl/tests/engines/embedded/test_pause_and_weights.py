"""Pause, abort, sleep and weight updates: rows stay whole, versions are told apart, nothing is ever mixed."""

import asyncio
import copy
import pickle

import pytest
import torch

from radix_rl.buckets.bucket import pack_buckets
from radix_rl.errors import ConfigurationError, EngineStateError, WeightUpdateError
from radix_rl.testing import tiny_model


async def wait_for_tokens(engine, count: int) -> None:
    while (await engine.stats()).generated_tokens < count:
        await asyncio.sleep(0.002)


def scaled(model, factor: float):
    """Another version of the weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(factor)
    return other


async def send(engine, model, version: str, *, bucket_bytes: int = 1 << 20) -> None:
    await engine.begin_weight_update(version)
    for bucket in pack_buckets(model.named_parameters(), bucket_bytes):
        await engine.update_weights(bucket)
    await engine.commit_weight_update(version)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_paused_and_resumed_answer_equals_an_undisturbed_one(
    qwen3_moe, engine_of, prompt, request_of, check_against, mode
):
    requests = [
        request_of(str(i), prompt(10 + i, i), max_new_tokens=60, seed=i, return_routed_experts=True)
        for i in range(5)
    ]
    async with engine_of(qwen3_moe) as engine:
        calm = await asyncio.gather(*[engine.generate(request) for request in requests])
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        for _ in range(3):
            await wait_for_tokens(engine, (await engine.stats()).generated_tokens + 20)
            await engine.pause(mode)
            await engine.resume()
        outputs = await asyncio.gather(*running)
    for request, output, expected in zip(requests, outputs, calm, strict=True):
        assert output.output_ids == expected.output_ids
        check_against(qwen3_moe, request, output)


async def test_abort_returns_partial_tokens_with_exactly_their_rows(
    qwen3_moe, engine_of, prompt, request_of, check_against
):
    request = request_of("a", prompt(10, 1), max_new_tokens=200, return_routed_experts=True)
    async with engine_of(qwen3_moe) as engine:
        running = asyncio.create_task(engine.generate(request))
        await wait_for_tokens(engine, 5)
        await engine.abort("a")
        output = await running
        # Resumed as a new request over what is there: rows of both together are those of one forward pass.
        longer = request_of(
            "b",
            (*request.input_ids, *output.output_ids),
            max_new_tokens=5,
            return_routed_experts=True,
            routed_experts_start_len=10 + len(output.output_ids) - 1,
        )
        rest = await engine.generate(longer)
    assert output.finish_reason.type == "abort"
    assert 5 <= len(output.output_ids) < 200
    check_against(qwen3_moe, request, output)
    check_against(qwen3_moe, longer, rest)
    total = len(output.outputs.routed_experts) + len(rest.outputs.routed_experts)
    assert total == 10 + len(output.output_ids) + 5 - 1


async def test_abort_in_the_queue_answers_without_outputs(qwen3_moe, engine_of, prompt, request_of):
    async with engine_of(qwen3_moe) as engine:
        await engine.pause()
        waiting = asyncio.create_task(
            engine.generate(
                request_of("a", prompt(10, 1), return_routed_experts=True, return_sampling_mask=True)
            )
        )
        while not (await engine.stats()).num_waiting:
            await asyncio.sleep(0)
        await engine.abort("a")
        output = await waiting
        await engine.abort("unknown")
    assert output.finish_reason.type == "abort"
    assert output.output_ids == ()
    assert output.outputs is None


@pytest.mark.parametrize("start", [0, 7])
async def test_abort_of_a_retracted_request_returns_its_tokens_and_rows(
    start, qwen3_moe, engine_of, prompt, request_of, check_against
):
    fields = {"return_routed_experts": True, "routed_experts_start_len": start}
    request = request_of("a", prompt(10, 1), max_new_tokens=200, **fields)
    async with engine_of(qwen3_moe) as engine:
        running = asyncio.create_task(engine.generate(request))
        await wait_for_tokens(engine, 5)
        await engine.pause("retract")
        await engine.abort()
        output = await running
    assert len(output.output_ids) >= 5
    check_against(qwen3_moe, request, output)


async def test_pause_abort_ends_everything_and_new_requests_wait(qwen3_moe, engine_of, prompt, request_of):
    async with engine_of(qwen3_moe) as engine:
        running = asyncio.create_task(engine.generate(request_of("a", prompt(10, 1), max_new_tokens=200)))
        await wait_for_tokens(engine, 3)
        await engine.pause("abort")
        assert (await running).finish_reason.type == "abort"
        queued = asyncio.create_task(engine.generate(request_of("b", prompt(10, 1), max_new_tokens=3)))
        await asyncio.sleep(0.05)
        assert not queued.done()
        with pytest.raises(EngineStateError, match="paused already"):
            await engine.pause("in_place")
        await engine.resume()
        await engine.resume()
        assert len((await queued).output_ids) == 3
        with pytest.raises(ConfigurationError, match="'gently'"):
            await engine.pause("gently")


async def test_cancelled_generate_frees_its_slot(qwen3_moe, engine_of, prompt, request_of):
    async with engine_of(qwen3_moe) as engine:
        running = asyncio.create_task(engine.generate(request_of("a", prompt(10, 1), max_new_tokens=200)))
        await wait_for_tokens(engine, 3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        stats = await engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)


@pytest.mark.parametrize("bucket_bytes", [200, 1 << 24])
async def test_new_weights_take_effect_whatever_the_bucket_size(
    qwen3_moe, engine_of, prompt, request_of, check_against, bucket_bytes
):
    other = scaled(qwen3_moe, 1.2)
    request = request_of("a", prompt(20, 1), max_new_tokens=20, temperature=0.0, return_routed_experts=True)
    async with engine_of(qwen3_moe) as engine:
        before = await engine.generate(request)
        for version in ("1", "2"):
            await send(engine, other, version, bucket_bytes=bucket_bytes)
            after = await engine.generate(request)
            check_against(other, request, after)
        assert (await engine.info()).weight_version == "2"
    check_against(qwen3_moe, request, before)
    assert [span.version for span in before.version_spans] == ["0"]
    assert [span.version for span in after.version_spans] == ["2"]


async def test_update_while_paused_in_place_keeps_the_cache_and_records_spans(
    qwen3_moe, engine_of, prompt, request_of
):
    request = request_of("a", prompt(20, 1), max_new_tokens=120)
    async with engine_of(qwen3_moe) as engine:
        running = asyncio.create_task(engine.generate(request))
        await wait_for_tokens(engine, 5)
        with pytest.raises(EngineStateError, match="pause the engine"):
            await send(engine, qwen3_moe, "1")
        await engine.abort_weight_update()
        await engine.pause("in_place")
        prefilled = (await engine.stats()).prefilled_tokens
        await send(engine, scaled(qwen3_moe, 1.2), "1")
        await engine.resume()
        output = await running
        assert (await engine.stats()).prefilled_tokens == prefilled
    first, second = output.version_spans
    assert (first.start, first.version, second.version) == (0, "0", "1")
    assert first.end == second.start
    assert second.end == len(output.output_ids) == 120


async def test_refused_update_leaves_the_old_weights_in_force(qwen3_moe, engine_of, prompt, request_of):
    request = request_of("a", prompt(20, 1), max_new_tokens=10, temperature=0.0)
    named = dict(scaled(qwen3_moe, 1.3).named_parameters())
    wrong_shape = {**named, "lm_head.weight": named["lm_head.weight"][:5]}
    extra = {**named, "model.stranger": torch.zeros(2)}
    whole = {**named, "lm_head.weight": named["lm_head.weight"].long()}
    async with engine_of(qwen3_moe) as engine:
        before = await engine.generate(request)
        for tensors, message in [
            (wrong_shape, r"lm_head.weight.*expected shape \(128, 64\), got \(5, 64\)"),
            (extra, "stranger"),
            (whole, "expected dtype torch.float32, got torch.int64"),
        ]:
            await engine.begin_weight_update("1")
            (bucket,) = pack_buckets(tensors.items(), 1 << 24)
            with pytest.raises(WeightUpdateError, match=message) as refused:
                await engine.update_weights(bucket)
            assert "version '0' stays in force" in str(refused.value)
            await engine.abort_weight_update()
        del named["model.norm.weight"]
        await engine.begin_weight_update("1")
        for bucket in pack_buckets(named.items(), 1 << 24):
            await engine.update_weights(bucket)
        with pytest.raises(WeightUpdateError, match=r"missing model\.norm\.weight"):
            await engine.commit_weight_update("1")
        with pytest.raises(EngineStateError, match="needs an open update"):
            await engine.commit_weight_update("1")
        after = await engine.generate(request)
    assert after.output_ids == before.output_ids
    assert after.output_logprobs == before.output_logprobs
    assert pickle.loads(pickle.dumps(refused.value)).args == refused.value.args


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.gate.weight", "model.embed_tokens.weight", "model.layers.2.mlp.experts.down_proj"],
)
async def test_weights_that_are_not_finite_are_refused_at_the_commit_and_named(
    name, value, qwen3_moe, engine_of, prompt, request_of, check_against
):
    broken = copy.deepcopy(qwen3_moe)
    with torch.no_grad():
        broken.get_parameter(name)[3] = value
        broken.lm_head.weight[0] = value
    async with engine_of(qwen3_moe) as engine:
        with pytest.raises(WeightUpdateError, match=f"'0' stays in force: '{name}' has values"):
            await send(engine, broken, "1")
        request = request_of("a", prompt(10, 1), max_new_tokens=4, return_routed_experts=True)
        check_against(qwen3_moe, request, await engine.generate(request))
        await send(engine, qwen3_moe, "1")


async def test_weights_too_large_for_the_engines_dtype_are_refused(qwen3_moe, engine_of):
    large = copy.deepcopy(qwen3_moe)
    with torch.no_grad():
        large.model.norm.weight[0] = 1e5
    async with engine_of(qwen3_moe, dtype="float16") as engine:
        with pytest.raises(WeightUpdateError, match=r"'model.norm.weight' has values that are not finite"):
            await send(engine, large, "1")


async def test_large_weights_are_finite_though_their_sum_is_not(qwen3_moe, engine_of):
    large = copy.deepcopy(qwen3_moe)
    with torch.no_grad():
        large.model.norm.weight.fill_(3e38)
    async with engine_of(qwen3_moe) as engine:
        await send(engine, large, "1")
        assert (await engine.info()).weight_version == "1"


async def test_weights_in_float32_are_cast_to_the_engine_dtype(qwen3_moe, engine_of):
    async with engine_of(qwen3_moe, dtype="bfloat16") as engine:
        await send(engine, qwen3_moe, "1")
        weight = engine._core_now().runner.model.lm_head.weight
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, qwen3_moe.lm_head.weight.bfloat16())


async def test_tied_weights_are_needed_once_and_must_agree(engine_of):
    model = tiny_model("llama", tie_word_embeddings=True)
    async with engine_of(model, enable_return_routed_experts=False) as engine:
        await send(engine, scaled(model, 2.0), "1")
        core = engine._core_now()
        assert core.runner.model.lm_head.weight is core.runner.model.model.embed_tokens.weight
        assert torch.equal(core.runner.model.lm_head.weight, 2 * model.lm_head.weight)
        for head, accepted in [(model.lm_head.weight, True), (model.lm_head.weight + 1, False)]:
            await engine.begin_weight_update("2")
            named = [*model.named_parameters(), ("lm_head.weight", head)]
            buckets = list(pack_buckets(named, 64))
            for bucket in buckets[:-1]:
                await engine.update_weights(bucket)
            if accepted:
                await engine.update_weights(buckets[-1])
                await engine.commit_weight_update("2")
            else:
                with pytest.raises(WeightUpdateError, match="tied"):
                    await engine.update_weights(buckets[-1])


async def test_tied_weights_may_come_under_both_names_in_any_order(engine_of):
    model = tiny_model("llama", tie_word_embeddings=True)
    head, rest = ("lm_head.weight", model.lm_head.weight), list(model.named_parameters())
    async with engine_of(model, enable_return_routed_experts=False) as engine:
        for bucket_bytes in (64, 1 << 20):
            await engine.begin_weight_update("1")
            for bucket in pack_buckets([head, *rest], bucket_bytes):
                await engine.update_weights(bucket)
            await engine.commit_weight_update("1")
        # In one bucket, too, they must agree.
        await engine.begin_weight_update("2")
        (bucket,) = pack_buckets([*rest, (head[0], head[1] + 1)], 1 << 20)
        with pytest.raises(WeightUpdateError, match="tied"):
            await engine.update_weights(bucket)
        assert (await engine.info()).weight_version == "1"


async def test_a_refusal_names_the_first_of_many_tensors(qwen3_moe, engine_of):
    async with engine_of(qwen3_moe) as engine:
        await engine.begin_weight_update("1")
        (bucket,) = pack_buckets([(f"w{i:03}", torch.ones(1)) for i in range(500)], 1 << 20)
        with pytest.raises(WeightUpdateError, match=r"'w019' is no weight of the model and 480 more$"):
            await engine.update_weights(bucket)


async def test_dropped_weights_refuse_to_generate_until_a_commit(
    qwen3_moe, engine_of, prompt, request_of, check_against
):
    request = request_of("a", prompt(20, 1), max_new_tokens=10, return_routed_experts=True)
    async with engine_of(qwen3_moe) as engine:
        core = engine._core_now()
        await engine.generate(request)
        await engine.sleep()
        await engine.sleep()
        assert sum(p.numel() for p in core.runner.model.parameters()) == 0
        assert core.runner.cache.size_bytes == 0
        for refused in (engine.generate(request), engine.health()):
            with pytest.raises(EngineStateError, match="no weights"):
                await refused
        with pytest.raises(EngineStateError, match="wake"):
            await engine.begin_weight_update("1")
        with pytest.raises(EngineStateError, match="weights are asleep"):
            await engine.wake(["kv_cache"])
        await engine.wake(["weights"])
        with pytest.raises(EngineStateError, match="no weights"):
            await engine.generate(request)
        await send(engine, qwen3_moe, "1")
        with pytest.raises(EngineStateError, match="cache is asleep"):
            await engine.generate(request)
        await engine.wake(["kv_cache"])
        await engine.wake()
        await engine.health()
        check_against(qwen3_moe, request, await engine.generate(request))


async def test_interrupted_update_of_dropped_weights_leaves_none_in_force(
    qwen3_moe, engine_of, prompt, request_of
):
    async with engine_of(qwen3_moe) as engine:
        await engine.sleep(["weights"])
        await engine.wake(["weights"])
        await engine.begin_weight_update("1")
        bucket = next(iter(pack_buckets(qwen3_moe.named_parameters(), 1000)))
        await engine.update_weights(bucket)
        await engine.abort_weight_update()
        with pytest.raises(EngineStateError, match="no weights"):
            await engine.generate(request_of("a", prompt(3, 1)))


async def test_cache_asleep_alone_wakes_and_answers_as_before(qwen3_moe, engine_of, prompt, request_of):
    request = request_of("a", prompt(20, 1), max_new_tokens=10, seed=1)
    async with engine_of(qwen3_moe) as engine:
        before = await engine.generate(request)
        await engine.sleep(["kv_cache"])
        await engine.wake(["weights"])
        await engine.wake(["kv_cache"])
        assert (await engine.generate(request)).output_ids == before.output_ids
        with pytest.raises(ConfigurationError, match="'brain'"):
            await engine.sleep(["brain"])


async def test_sleep_is_refused_while_requests_hold_the_cache(qwen3_moe, engine_of, prompt, request_of):
    async with engine_of(qwen3_moe) as engine:
        running = asyncio.create_task(engine.generate(request_of("a", prompt(10, 1), max_new_tokens=100)))
        await wait_for_tokens(engine, 3)
        with pytest.raises(EngineStateError, match="1 requests hold the cache"):
            await engine.sleep()
        await engine.pause("in_place")
        await engine.sleep(["weights"])
        await engine.wake(["weights"])
        await send(engine, qwen3_moe, "1")
        await engine.resume()
        output = await running
    assert len(output.output_ids) == 100
    assert [span.version for span in output.version_spans] == ["0", "1"]


async def test_many_updates_leave_memory_flat(qwen3_moe, engine_of):
    import gc

    def live_bytes() -> int:
        gc.collect()
        tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)

    async with engine_of(qwen3_moe) as engine:
        await send(engine, qwen3_moe, "1")
        before = live_bytes()
        for version in range(2, 8):
            await send(engine, qwen3_moe, str(version))
        assert live_bytes() <= before
