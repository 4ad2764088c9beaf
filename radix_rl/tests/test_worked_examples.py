"""The worked examples in docstrings give what they say."""

import doctest

import numpy as np
import torch

from radix_rl.engines.embedded.cache.slots import SlotCache
from radix_rl.engines.embedded.forward import segments
from radix_rl.engines.embedded.schedule.sequence import Sequence
from radix_rl.engines.embedded.schedule.slot_table import SlotTable
from radix_rl.rollout.sample import Sample
from radix_rl.types import FinishReason, GenerateOutput, GenerateRequest, SamplingParams
from radix_transfer_plugins import TokenOutputStash


def test_the_example_of_segments():
    assert doctest.testmod(segments) == (0, 4)


def test_the_example_of_the_slot_table():
    cache = SlotCache(capacity_tokens=64, device=torch.device("cpu"))
    tensor = cache.add(heads=1, width=1, dtype=torch.int64)
    table = SlotTable(cache, max_running_requests=3)
    requests = {}
    for name, computed in (("A", 9), ("B", 7), ("C", 0)):
        request = GenerateRequest(
            request_id=name, input_ids=(1, 2, 3, 4), sampling=SamplingParams(max_new_tokens=12)
        )
        requests[name] = Sequence(request=request, seed=0, stop_token_ids=frozenset(), on_finish=print)
        assert table.try_add(requests[name])
        requests[name].computed = computed
    table.prefill_done(2)
    assert cache.stride == 16
    assert (table.decoding, table.prefilling) == ([requests["A"], requests["B"]], [requests["C"]])
    slots, positions = torch.tensor([0, 1, 2, 2, 2, 2]), torch.tensor([9, 7, 0, 1, 2, 3])
    rows = cache.flat_rows(1, slots, positions)
    assert rows.tolist() == [9, 23, 32, 33, 34, 35]
    tensor.write(rows, torch.arange(6)[:, None])
    table.prefill_done(1)
    requests["C"].computed = 4
    table.remove(0)
    assert table.running == [requests["C"], requests["B"]]
    assert tensor.read(0, 0, 4).flatten().tolist() == [2, 3, 4, 5]


def test_the_example_of_the_replay_index():
    def turn(prompt, start):
        request = GenerateRequest(
            request_id="r",
            input_ids=prompt,
            return_routed_experts=True,
            return_sampling_mask=True,
            routed_experts_start_len=start,
        )
        stash = TokenOutputStash(
            routed_experts=np.zeros((len(prompt) + 1 - start, 1, 1), np.int32),
            sampling_mask_lengths=np.ones(2, np.int32),
            sampling_mask_token_ids=np.zeros(2, np.int32),
        )
        output = GenerateOutput(
            request_id="r",
            prompt_tokens=len(prompt),
            output_ids=(8, 9),
            output_logprobs=(-1.0, -1.0),
            finish_reason=FinishReason(type="length", length=2),
            version_spans=(),
            outputs=stash,
            routed_experts_start=start,
        )
        return request, output

    sample = Sample.from_response(*turn((1, 2, 3), 0), group_id=0, index=0, store_backend=None)
    assert sample.replay.covered_rows == 4
    sample.add_response(*turn((1, 2, 3, 8, 9, 7), 4), store_backend=None)

    def rows(field):
        return [(segment.start_row, segment.end_row) for segment in sample.replay.segments[field]]

    assert rows("routed_experts") == [(0, 4), (4, 7)]
    assert rows("sampling_mask_lengths") == [(3, 5), (6, 8)]
