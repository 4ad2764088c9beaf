"""Requests of unequal length decode in tiers, so that attention reads fewer keys of the shorter ones."""

import asyncio

import numpy as np
import pytest
import torch

from radix_rl.engines.embedded.cache.slots import SlotCache
from radix_rl.engines.embedded.forward import runner
from radix_rl.engines.embedded.forward.segments import cut_segments
from radix_rl.engines.embedded.schedule.sequence import Sequence
from radix_rl.engines.embedded.schedule.slot_table import SlotTable, tier_ends
from radix_rl.types import GenerateRequest, SamplingParams


def sequence_of(number: int, length: int) -> Sequence:
    request = GenerateRequest(
        request_id=str(number), input_ids=(number,), sampling=SamplingParams(max_new_tokens=100)
    )
    sequence = Sequence(request=request, seed=0, stop_token_ids=frozenset(), on_finish=lambda _: None)
    sequence.computed = length
    return sequence


def test_tiers_double():
    assert list(tier_ends(8)) == []
    assert list(tier_ends(9)) == [8]
    assert list(tier_ends(64)) == [8, 16, 32]


def test_segments_are_cut_where_enough_keys_go_unread():
    computed, lengths = [90] * 8 + [50] * 8 + [20] * 4, [1] * 20

    def shapes(worth: float, first_slot: int = 0) -> list[tuple[int, int, int]]:
        segments = cut_segments(first_slot, computed, lengths, worth)
        return [(segment.first_slot, segment.num_slots, segment.key_length) for segment in segments]

    assert shapes(float("inf")) == [(0, 20, 91)]
    assert shapes(480) == [(0, 8, 91), (8, 12, 51)]
    assert shapes(120) == [(0, 8, 91), (8, 8, 51), (16, 4, 21)]
    # Tiers belong to the slots, wherever a step begins.
    assert shapes(120, first_slot=4) == [(4, 12, 91), (16, 8, 51)]
    mixed = cut_segments(0, [3, 3, 0], [1, 1, 5], 1)
    assert [(segment.num_slots, segment.columns, segment.key_length) for segment in mixed] == [
        (2, 1, 4),
        (1, 5, 5),
    ]


@pytest.fixture
def table():
    """34 requests that decode and two that prefill; each slot holds its request's number."""
    cache = SlotCache(capacity_tokens=40 * 112, device=torch.device("cpu"))
    held = cache.add(1, 1, torch.int32)
    table = SlotTable(cache, max_running_requests=40)
    rng = np.random.default_rng(0)
    lengths = [*sorted(rng.integers(1, 100, 34).tolist(), reverse=True), 5, 3]
    for number, length in enumerate(lengths):
        assert table.try_add(sequence_of(number, length))
    table.prefill_done(34)
    for slot, sequence in enumerate(table.running):
        held.slots[slot, 0, : sequence.computed] = sequence.request.input_ids[0]
    table.held = held
    return table


def test_whoever_leaves_the_longest_stay_in_front_and_keep_what_they_have(table):
    rng = np.random.default_rng(1)
    while table.num_decoding > 3:
        slot = int(rng.integers(len(table.running)))
        gone = table.running[slot]
        before = set(map(id, table.running)) - {id(gone)}
        table.remove(slot)
        assert set(map(id, table.running)) == before
        for number, sequence in enumerate(table.running):
            content = table.held.slots[number, 0, : sequence.computed]
            assert (content == sequence.request.input_ids[0]).all()
        lengths = [sequence.computed for sequence in table.decoding]
        for end in tier_ends(len(lengths)):
            assert min(lengths[:end]) >= max(lengths[end:])


async def test_answers_equal_a_full_forward_pass_in_tiers(
    qwen3_moe, engine_of, prompt, request_of, check_against, monkeypatch
):
    monkeypatch.setattr(runner, "CPU_WORTH_A_CUT_BYTES", 1)
    most = 0

    def counted(*args):
        nonlocal most
        segments = cut_segments(*args)
        most = max(most, sum(segment.columns == 1 for segment in segments))
        return segments

    monkeypatch.setattr(runner, "cut_segments", counted)
    requests = [
        request_of(
            str(i), prompt(1 + 3 * (i % 9), i), max_new_tokens=4 + 2 * (i % 13), return_routed_experts=True
        )
        for i in range(60)
    ]
    async with engine_of(
        qwen3_moe, max_running_requests=24, kv_cache_tokens=24 * 64, chunked_prefill_tokens=256
    ) as engine:
        answers = await asyncio.gather(*[engine.generate(request) for request in requests])
    assert most >= 3
    for request, answer in zip(requests, answers, strict=True):
        assert len(answer.output_ids) == request.sampling.max_new_tokens
        check_against(qwen3_moe, request, answer)
