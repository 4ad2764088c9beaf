"""Attention over slots: every token as if it were alone, however its step is cut into segments."""

import pytest
import torch

from radix_rl.engines.embedded.cache.slots import SlotCache
from radix_rl.engines.embedded.forward.attention import slot_attention, slot_mask
from radix_rl.engines.embedded.step import ForwardStep, Segment, running_step

HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6
SEGMENTS = {
    "one": [Segment(1, 3, 1, 20)],
    "tiers": [Segment(0, 2, 1, 30), Segment(2, 3, 1, 12)],
    "tiers and prompts": [Segment(0, 2, 1, 30), Segment(2, 1, 5, 5), Segment(3, 2, 3, 9)],
}


def make_step(cache: SlotCache, segments: list[Segment]) -> ForwardStep:
    slots, positions = [], []
    for segment in segments:
        for slot in range(segment.first_slot, segment.first_slot + segment.num_slots):
            slots += [slot] * segment.columns
            positions += range(segment.key_length - segment.columns, segment.key_length)
    shape = (1, -1) if len(segments) > 1 else (segments[0].num_slots, segments[0].columns)
    return ForwardStep(
        cache=cache,
        segments=segments,
        input_ids=torch.zeros(len(slots), dtype=torch.int64).view(shape),
        positions=torch.tensor(positions).view(shape),
        slots=torch.tensor(slots),
    )


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def by_token(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a slot's tokens, not its heads, apart in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS.keys())
@pytest.mark.parametrize("layout", [as_it_is, by_token])
def test_each_token_sees_its_own_slot_up_to_itself(segments, layout):
    torch.manual_seed(0)
    cache = SlotCache(capacity_tokens=512, device=torch.device("cpu"))
    keys = cache.add(KEY_HEADS, WIDTH, torch.float32)
    values = cache.add(KEY_HEADS, VALUE_WIDTH, torch.float32)
    cache.divide(64, [])
    keys.slots.normal_()
    values.slots.normal_()
    step = make_step(cache, segments)
    query = torch.randn(*step.input_ids.shape, HEADS, WIDTH).transpose(1, 2)

    with running_step(step):
        seen_keys, seen_values = layout(step.keys(keys)), layout(step.keys(values))
        output, _ = slot_attention(torch.nn.Identity(), query, seen_keys, seen_values, slot_mask(), 0.3)

    tokens = query.transpose(1, 2).reshape(-1, HEADS, WIDTH)
    for token, slot, position, found in zip(
        tokens, step.slots, step.positions.view(-1), output.reshape(-1, HEADS, VALUE_WIDTH), strict=True
    ):
        key = keys.slots[slot, :, : position + 1].repeat_interleave(HEADS // KEY_HEADS, dim=0)
        value = values.slots[slot, :, : position + 1].repeat_interleave(HEADS // KEY_HEADS, dim=0)
        weights = (torch.einsum("hd,hld->hl", token, key) * 0.3).softmax(dim=-1)
        torch.testing.assert_close(found, torch.einsum("hl,hld->hd", weights, value), atol=1e-5, rtol=1e-5)
