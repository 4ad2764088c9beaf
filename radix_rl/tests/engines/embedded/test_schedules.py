"""All replay outputs at once equal one full forward pass over the final tokens.

Whatever the scheduler did to the request on its way; and no request is kept from its turn for ever.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
import transformers as tf

from radix_rl.types import GenerateOutput, GenerateRequest


@pytest.fixture
def sparse_moe() -> tf.PreTrainedModel:
    """A DeepSeek-V3.2 of three layers, the first one dense: it has routers and indexers."""
    config = tf.DeepseekV32Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        index_topk=6,
        index_n_heads=32,
        index_head_dim=32,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = tf.DeepseekV32ForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15, generator=generator)
    return model.eval()


@pytest.fixture(params=["indexers", "mixed steps"])
def model(request) -> tf.PreTrainedModel:
    """Of a model without indexers, prompts of any length run in the steps of those that decode."""
    return request.getfixturevalue("sparse_moe" if request.param == "indexers" else "qwen3_moe")


@pytest.fixture
def engine_of_all(model, engine_of):
    """Engines that capture all there is."""
    return partial(engine_of, model, enable_return_indexer_topk=_has_indexers(model))


def _has_indexers(model: tf.PreTrainedModel) -> bool:
    return hasattr(model.config, "index_topk")


SAMPLING = (
    {"top_p": 0.8},
    {"top_k": 5, "temperature": 1.2},
    {"temperature": 0.0},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"min_p": 0.05, "temperature": 0.7},
    {},
)


@pytest.fixture
def requests(model, prompt, request_of) -> list[GenerateRequest]:
    """Seven of unequal length that ask for all there is; every other one begins with the same 40 tokens."""
    shared = prompt(40, 99)
    return [
        request_of(
            str(i),
            (*shared, *prompt(3 * i, i)) if i % 2 else prompt(5 + 9 * i, i),
            max_new_tokens=12 + i,
            seed=i,
            sampling_logprobs_mode="support" if i % 3 else "selected",
            return_routed_experts=True,
            return_indexer_topk=_has_indexers(model),
            return_sampling_mask=True,
            **SAMPLING[i % len(SAMPLING)],
        )
        for i in range(7)
    ]


@pytest.fixture
def check_everything(check_against) -> Callable[..., None]:
    """Hold the replay outputs asked for, and log-probabilities, against the model alone."""

    def check(model: tf.PreTrainedModel, request: GenerateRequest, output: GenerateOutput) -> None:
        check_against(model, request, output)
        ids = torch.tensor([[*request.input_ids, *output.output_ids]])
        kept: list[torch.Tensor] = []
        handles = [
            module.register_forward_hook(lambda _m, _a, out: kept.append(out[0]))
            for module in model.modules()
            if type(module).__name__.endswith("Indexer")
        ]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].float()
        for handle in handles:
            handle.remove()
        if request.return_indexer_topk:
            _check_indexer(output, kept)
        if request.return_sampling_mask:
            _check_mask(request, output, logits[len(request.input_ids) - 1 : -1])

    return check


def _check_indexer(output: GenerateOutput, kept: list[torch.Tensor]) -> None:
    rows = output.outputs.indexer_topk
    assert rows.shape[1:] == (len(kept), 6)
    for row, position in enumerate(range(output.routed_experts_start, len(kept[0]) - 1)):
        for layer, choices in enumerate(kept):
            expected = sorted(p for p in choices[position].tolist() if p <= position)
            assert rows[row, layer].tolist() == expected + [-1] * (6 - len(expected))


def _check_mask(request: GenerateRequest, output: GenerateOutput, logits: torch.Tensor) -> None:
    stash = output.outputs
    ends = np.cumsum(stash.sampling_mask_lengths)
    assert len(ends) == len(output.output_ids)
    assert ends[-1] == len(stash.sampling_mask_token_ids)
    temperature = request.sampling.temperature
    for i, token in enumerate(output.output_ids):
        span = slice(ends[i] - stash.sampling_mask_lengths[i], ends[i])
        support = stash.sampling_mask_token_ids[span].tolist()
        assert sorted(support) == sorted(logits[i].topk(len(support)).indices.tolist())
        assert token in support
        if not temperature:
            assert support == [token]
            continue
        scores = logits[i] / temperature
        logprobs = (scores[support] - scores[support].logsumexp(0)).numpy()
        assert output.output_logprobs[i] == pytest.approx(logprobs[support.index(token)], abs=2e-4)
        if request.sampling_logprobs_mode == "support":
            np.testing.assert_allclose(stash.sampling_mask_logprobs[span], logprobs, atol=2e-4)
            in_support = stash.sampling_mask_logprobs[span][support.index(token)]
            assert in_support == pytest.approx(output.output_logprobs[i], abs=1e-6)
    assert (stash.sampling_mask_logprobs is None) == (request.sampling_logprobs_mode == "selected")


async def _until_tokens(engine, count: int) -> None:
    while (await engine.stats()).generated_tokens < count:
        await asyncio.sleep(0.001)


async def _disturbed(engine, requests: list[GenerateRequest], mode: str) -> list[GenerateOutput]:
    """Answers of requests that ran together through four pauses."""
    running = [asyncio.create_task(engine.generate(request)) for request in requests]
    for pause in range(4):
        await _until_tokens(engine, 10 + 20 * pause)
        await engine.pause(mode)
        await engine.resume()
    return await asyncio.gather(*running)


@pytest.mark.parametrize("disturbance", ["retract", "in_place"])
async def test_all_outputs_equal_one_forward_and_seeded_tokens_those_of_a_request_alone(
    model, engine_of_all, requests, check_everything, disturbance
):
    async with engine_of_all() as engine:
        alone = [await engine.generate(request) for request in requests]
    async with engine_of_all(prefix_cache_tokens=400, chunked_prefill_tokens=16) as engine:
        outputs = await _disturbed(engine, requests, disturbance)
        # The second time much comes from the prefix cache.
        again = await asyncio.gather(
            *[engine.generate(msgspec.structs.replace(r, request_id=f"{r.request_id}+")) for r in requests]
        )
    assert sum(output.num_retractions for output in outputs) > 0 or disturbance != "retract"
    assert sum(output.cached_tokens for output in again) > 200
    for request, output, repeated, expected in zip(requests, outputs, again, alone, strict=True):
        assert output.output_ids == repeated.output_ids == expected.output_ids
        check_everything(model, request, output)
        check_everything(model, request, repeated)


@pytest.mark.parametrize("disturbance", ["retract", "in_place"])
async def test_requests_that_ask_for_different_outputs_get_those(
    model, engine_of_all, requests, check_everything, disturbance
):
    """Steps capture what somebody of theirs asks for; without a prefix cache nobody else wants it."""
    requests = [
        msgspec.structs.replace(
            request,
            return_routed_experts=i in (1, 4, 5),
            return_indexer_topk=i in (2, 4, 6) and request.return_indexer_topk,
            return_sampling_mask=i in (3, 5),
        )
        for i, request in enumerate(requests)
    ]
    async with engine_of_all(chunked_prefill_tokens=16, max_running_requests=3) as engine:
        outputs = await _disturbed(engine, requests, disturbance)
    for request, output in zip(requests, outputs, strict=True):
        check_everything(model, request, output)
        asked = (request.return_routed_experts, request.return_indexer_topk, request.return_sampling_mask)
        stash = output.outputs
        assert (stash is not None) == any(asked)
        if stash is not None:
            found = (stash.routed_experts, stash.indexer_topk, stash.sampling_mask_token_ids)
            assert tuple(array is not None for array in found) == asked


async def test_aborted_and_continued_outputs_join_to_those_of_one_forward(
    model, engine_of_all, requests, check_everything
):
    def rest_of(request: GenerateRequest, output: GenerateOutput) -> GenerateRequest:
        ids = (*request.input_ids, *output.output_ids)
        left = request.sampling.max_new_tokens - len(output.output_ids)
        return msgspec.structs.replace(
            request,
            input_ids=ids,
            sampling=msgspec.structs.replace(request.sampling, max_new_tokens=left),
            routed_experts_start_len=len(ids) - 1 if output.output_ids else 0,
        )

    num_continued = 0
    async with engine_of_all(prefix_cache_tokens=400, chunked_prefill_tokens=16) as engine:
        alone = [await engine.generate(request) for request in requests]
        await engine.flush_cache()
        started = (await engine.stats()).generated_tokens
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        await _until_tokens(engine, started + 40)
        await engine.abort()
        for request, expected, cut in zip(requests, alone, await asyncio.gather(*running), strict=True):
            if cut.output_ids:
                check_everything(model, request, cut)
            else:
                assert cut.outputs is None
            if cut.finish_reason.type != "abort":
                continue
            continued = rest_of(request, cut)
            rest = await engine.generate(continued)
            check_everything(model, continued, rest)
            assert (*cut.output_ids, *rest.output_ids) == expected.output_ids
            rows = sum(len(o.outputs.routed_experts) for o in (cut, rest) if o.outputs is not None)
            assert rows == len(request.input_ids) + len(expected.output_ids) - 1
            num_continued += bool(cut.output_ids)
    assert num_continued > 0


async def test_penalties_count_the_tokens_from_before_a_retraction(qwen3_moe, engine_of, prompt, request_of):
    request = request_of(
        "a",
        prompt(10, 1),
        max_new_tokens=150,
        temperature=0.0,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        repetition_penalty=1.2,
    )
    async with engine_of(qwen3_moe) as engine:
        calm = await engine.generate(request)
        running = asyncio.create_task(engine.generate(request))
        for tokens in (160, 180, 200):
            await _until_tokens(engine, tokens)
            await engine.pause("retract")
            await engine.resume()
        output = await running
    assert output.num_retractions > 0
    assert output.output_ids == calm.output_ids
    np.testing.assert_allclose(output.output_logprobs, calm.output_logprobs, atol=2e-4)


async def test_more_requests_than_a_chunk_has_tokens_decode_together(
    qwen3_moe, engine_of, prompt, request_of, check_against
):
    requests = [
        request_of(str(i), prompt(4, i), max_new_tokens=30, seed=i, return_routed_experts=True)
        for i in range(24)
    ]
    async with engine_of(qwen3_moe, max_running_requests=24, chunked_prefill_tokens=16) as engine:
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        most = 0
        while not all(task.done() for task in running):
            most = max(most, (await engine.stats()).num_running)
        for request, task in zip(requests, running, strict=True):
            check_against(qwen3_moe, request, await task)
    assert most == 24


async def test_prompts_share_the_forward_passes_of_those_that_decode(
    model, engine_of_all, prompt, request_of, check_against
):
    requests = [
        request_of(str(i), prompt(3 + 4 * i, i), max_new_tokens=20, seed=i, return_routed_experts=True)
        for i in range(6)
    ]
    shapes: list[tuple[int, ...]] = []
    async with engine_of_all() as engine:
        first = asyncio.create_task(engine.generate(requests[0]))
        await _until_tokens(engine, 3)
        await engine.pause("in_place")
        running = [first, *[asyncio.create_task(engine.generate(request)) for request in requests[1:]]]
        while (await engine.stats()).num_waiting < 5:
            await asyncio.sleep(0)
        engine._core_now().runner.model.register_forward_pre_hook(
            lambda _module, _args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        await engine.resume()
        for request, task in zip(requests, running, strict=True):
            check_against(model, request, await task)
    if _has_indexers(model):
        # Each prompt is alone, having a length of its own.
        assert shapes[:4] == [(1, 7), (2, 1), (1, 11), (3, 1)]
    else:
        # As many prompts as fit 48 tokens, with those that decode; then the last two.
        assert shapes[:3] == [(1, 1 + 7 + 11 + 15), (1, 4 + 19 + 23), (6, 1)]


@pytest.mark.parametrize("prefix_cache_tokens", [0, 256])
async def test_small_requests_that_never_end_coming_do_not_starve_a_large_one(
    qwen3_moe, engine_of, prompt, request_of, prefix_cache_tokens
):
    large_done = asyncio.Event()
    started_after, overtaking = 0, 0

    async def small_ones(engine, number: int, submitted: asyncio.Event) -> None:
        nonlocal started_after, overtaking
        for turn in range(200):
            late = submitted.is_set()
            started_after += late
            await engine.generate(request_of(f"{number}-{turn}", prompt(20, 7), max_new_tokens=5))
            overtaking += late and not large_done.is_set()
            if large_done.is_set():
                return
        raise AssertionError("200 requests came and went before a large one")

    async with engine_of(
        qwen3_moe, kv_cache_tokens=128, context_length=128, prefix_cache_tokens=prefix_cache_tokens
    ) as engine:
        submitted = asyncio.Event()
        streams = [asyncio.create_task(small_ones(engine, n, submitted)) for n in range(4)]
        while (await engine.stats()).generated_tokens < 20:
            await asyncio.sleep(0.001)
        large = asyncio.create_task(engine.generate(request_of("large", prompt(20, 7), max_new_tokens=100)))
        while not (await engine.stats()).num_waiting:
            await asyncio.sleep(0)
        submitted.set()
        assert len((await large).output_ids) == 100
        large_done.set()
        await asyncio.gather(*streams)
    assert started_after > 0
    # One of each stream may have been queued before the flag was seen.
    assert overtaking <= 4


async def test_prompts_that_fill_a_step_each_take_their_turn_in_order_of_arrival(
    model, engine_of_all, prompt, request_of
):
    order: list[int] = []

    async def one(engine, number: int) -> None:
        await engine.generate(request_of(str(number), prompt(16, number), max_new_tokens=1 + number % 2))
        order.append(number)

    async with engine_of_all(chunked_prefill_tokens=16) as engine:
        await engine.pause("in_place")
        running = []
        for number in range(40):
            running.append(asyncio.create_task(one(engine, number)))
            while (await engine.stats()).num_waiting <= number:
                await asyncio.sleep(0)
        await engine.resume()
        await asyncio.gather(*running)
    # An answer of two tokens may end with the one behind it.
    assert all(abs(place - number) <= 2 for place, number in enumerate(order))


async def test_a_long_prompt_does_not_stop_those_that_decode(qwen3_moe, engine_of, prompt, request_of):
    async with engine_of(qwen3_moe, chunked_prefill_tokens=16) as engine:
        short = asyncio.create_task(engine.generate(request_of("a", prompt(3, 1), max_new_tokens=200)))
        await _until_tokens(engine, 5)
        before = (await engine.stats()).generated_tokens
        long = await engine.generate(request_of("b", prompt(240, 2), max_new_tokens=1))
        after = (await engine.stats()).generated_tokens
        await short
    assert len(long.output_ids) == 1
    # 240 tokens are 15 steps of 16, and each of them also decodes.
    assert after - before >= 14 + 1


async def test_an_abort_while_the_prompt_is_prefilling_has_no_rows_and_frees_its_slot(
    qwen3_moe, engine_of, prompt, request_of
):
    request = request_of(
        "a", prompt(200, 1), return_routed_experts=True, return_sampling_mask=True, max_new_tokens=5
    )
    calls, third, go_on = itertools.count(1), threading.Event(), threading.Event()

    def wait_in_the_third_chunk(*_args: object) -> None:
        if next(calls) == 3:
            third.set()
            assert go_on.wait(10)

    async with engine_of(qwen3_moe, chunked_prefill_tokens=16) as engine:
        engine._core_now().runner.model.register_forward_pre_hook(wait_in_the_third_chunk)
        running = asyncio.create_task(engine.generate(request))
        assert await asyncio.to_thread(third.wait, 10)
        aborting = asyncio.create_task(engine.abort("a"))
        await asyncio.sleep(0)
        go_on.set()
        await aborting
        output = await running
        stats = await engine.stats()
    assert stats.prefilled_tokens == 48
    assert (output.finish_reason.type, output.output_ids, output.outputs) == ("abort", (), None)
    assert (stats.num_running, stats.kv_cache_tokens_used) == (0, 0)
