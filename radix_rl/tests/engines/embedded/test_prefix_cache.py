"""Reused prefixes change nothing but the work.

Tokens, log-probabilities and rows are those of a computation from scratch.
"""

import asyncio
import copy

import numpy as np
import pytest
import torch

from radix_rl.buckets.bucket import pack_buckets
from radix_rl.engines.embedded.cache.prefixes import PrefixCache
from radix_rl.engines.embedded.cache.slots import SlotCache


async def test_second_turn_reuses_the_first_and_returns_its_rows(
    qwen3_moe, engine_of, prompt, request_of, check_against
):
    first = request_of("1", prompt(40, 1), max_new_tokens=20, seed=1, return_routed_experts=True)
    async with engine_of(qwen3_moe, prefix_cache_tokens=512) as engine:
        answer = await engine.generate(first)
        ids = (*first.input_ids, *answer.output_ids, *prompt(7, 2))
        second = request_of("2", ids, max_new_tokens=10, seed=2, return_routed_experts=True)
        hit = await engine.generate(second)
        from_row = request_of(
            "3", ids, max_new_tokens=10, seed=2, return_routed_experts=True, routed_experts_start_len=59
        )
        partial = await engine.generate(from_row)
    # The last sampled token never went through the model.
    assert hit.cached_tokens == 40 + 20 - 1
    check_against(qwen3_moe, second, hit)
    check_against(qwen3_moe, from_row, partial)
    assert partial.output_ids == hit.output_ids
    assert len(partial.outputs.routed_experts) == len(ids) + 10 - 1 - 59


async def test_prefix_of_a_request_without_rows_has_them(
    qwen3_moe, engine_of, prompt, request_of, check_against
):
    plain = request_of("1", prompt(40, 1), max_new_tokens=4, seed=1)
    asking = request_of("2", prompt(40, 1), max_new_tokens=4, seed=1, return_routed_experts=True)
    async with engine_of(qwen3_moe, prefix_cache_tokens=512) as engine:
        await engine.generate(plain)
        hit = await engine.generate(asking)
    assert hit.cached_tokens == 39
    check_against(qwen3_moe, asking, hit)


async def test_samples_of_one_prompt_compute_it_once(qwen3_moe, engine_of, prompt, request_of, check_against):
    requests = [
        request_of(f"{p}-{i}", prompt(60, p), max_new_tokens=8, seed=i, return_routed_experts=True)
        for p in range(2)
        for i in range(4)
    ]
    async with engine_of(qwen3_moe, prefix_cache_tokens=512) as engine:
        outputs = await asyncio.gather(*[engine.generate(request) for request in requests])
        stats = await engine.stats()
    # Of each prompt one whole computation, and its last token for each of the other three.
    assert stats.prefilled_tokens == 2 * (60 + 3)
    for request, output in zip(requests, outputs, strict=True):
        check_against(qwen3_moe, request, output)


async def test_prefix_of_older_weights_is_never_hit(qwen3_moe, engine_of, prompt, request_of, check_against):
    request = request_of("a", prompt(40, 1), max_new_tokens=10, temperature=0.0, return_routed_experts=True)
    long = request_of("b", prompt(40, 1), max_new_tokens=100, temperature=0.0)
    other = copy.deepcopy(qwen3_moe)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.2)
    async with engine_of(qwen3_moe, prefix_cache_tokens=512) as engine:
        await engine.generate(request)
        running = asyncio.create_task(engine.generate(long))
        while not (await engine.stats()).num_running:
            await asyncio.sleep(0.001)
        await engine.pause("in_place")
        await engine.begin_weight_update("1")
        for bucket in pack_buckets(other.named_parameters(), 1 << 20):
            await engine.update_weights(bucket)
        await engine.commit_weight_update("1")
        await engine.resume()
        await running
        output = await engine.generate(request)
    assert output.cached_tokens == 0
    check_against(other, request, output)


async def test_flushed_prefix_is_computed_again(qwen3_moe, engine_of, prompt, request_of):
    request = request_of("a", prompt(40, 1), max_new_tokens=3)
    async with engine_of(qwen3_moe, prefix_cache_tokens=512) as engine:
        await engine.generate(request)
        assert (await engine.generate(request)).cached_tokens == 39
        assert (await engine.stats()).prefix_cache_tokens_used > 0
        await engine.flush_cache()
        assert (await engine.stats()).prefix_cache_tokens_used == 0
        assert (await engine.generate(request)).cached_tokens == 0
        await engine.sleep(["kv_cache"])
        await engine.wake(["kv_cache"])
        assert (await engine.generate(request)).cached_tokens == 0


@pytest.mark.parametrize("start", [0, 29])
async def test_retracted_request_keeps_the_rows_of_its_own_forward(
    start, qwen3_moe, engine_of, prompt, request_of, check_against
):
    fields = {"return_routed_experts": True, "routed_experts_start_len": start}
    request = request_of("a", prompt(30, 1), max_new_tokens=80, seed=1, **fields)
    async with engine_of(qwen3_moe, prefix_cache_tokens=64) as engine:
        running = asyncio.create_task(engine.generate(request))
        while (await engine.stats()).generated_tokens < 10:
            await asyncio.sleep(0.001)
        await engine.pause("retract")
        await engine.resume()
        output = await running
    assert output.num_retractions == 1
    check_against(qwen3_moe, request, output)


@pytest.fixture
def slots():
    """Two slots of 16 tokens; each token's cached value is its id."""
    cache = SlotCache(capacity_tokens=32, device=torch.device("cpu"))
    cache.add(1, 1, torch.float32)
    cache.divide(16, [])
    return cache


def fill(slots: SlotCache, tokens: list[int]) -> None:
    slots.tensors[0].slots[0, 0, : len(tokens), 0] = torch.tensor(tokens, dtype=torch.float32)


def cached(tree: PrefixCache, slots: SlotCache, tokens: list[int]) -> list[int]:
    places = tree.match(tokens)
    tree.load(places, 1)
    return slots.tensors[0].slots[1, 0, : len(places), 0].int().tolist()


def test_branches_share_their_beginning(slots):
    tree = PrefixCache(slots, 32)
    for tokens in ([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 6, 7], [9]):
        fill(slots, tokens)
        tree.insert(tokens, 0)
    assert tree.used_tokens == 4 + 2 + 1 + 1
    assert cached(tree, slots, [1, 2, 5, 6, 7, 8]) == [1, 2, 5, 6, 7]
    assert cached(tree, slots, [1, 2, 3]) == [1, 2, 3]
    assert cached(tree, slots, [2]) == []


def test_full_cache_drops_what_was_unused_for_longest(slots):
    tree = PrefixCache(slots, 8)
    for tokens in ([1, 2, 3], [4, 5, 6]):
        fill(slots, tokens)
        tree.insert(tokens, 0)
    tree.match([1, 2, 3])
    fill(slots, [7, 8, 9])
    tree.insert([7, 8, 9], 0)
    assert cached(tree, slots, [1, 2, 3]) == [1, 2, 3]
    assert cached(tree, slots, [7, 8, 9]) == [7, 8, 9]
    assert cached(tree, slots, [4, 5, 6]) == []


def test_random_use_never_returns_another_prefix(slots):
    rng = np.random.default_rng(0)
    tree = PrefixCache(slots, 24)
    for _ in range(500):
        tokens = rng.integers(0, 3, rng.integers(1, 14)).tolist()
        assert cached(tree, slots, tokens) == tokens[: len(tree.match(tokens))]
        fill(slots, tokens)
        tree.insert(tokens, 0)
        assert 0 <= tree.used_tokens <= 24
