"""A minibatch's samples, over the ranks."""

import pytest

from radix_rl.rollout.replay_index import ReplayIndex
from radix_rl.rollout.sample import Sample
from radix_rl.train.distributed import share_out
from radix_rl.train.plan.step_plan import SampleTask
from radix_rl.types import FinishReason


def task(num_response: int) -> SampleTask:
    sample = Sample(
        group_id=0,
        index=0,
        tokens=[1] * (2 + num_response),
        prompt_tokens=2,
        loss_mask=[1] * num_response,
        rollout_logprobs=[-1.0] * num_response,
        version_spans=[],
        finish_reason=FinishReason(type="stop"),
        replay=ReplayIndex(),
    )
    return SampleTask(sample=sample, advantage=1.0, loss_scale=0.25)


def test_every_task_goes_to_one_rank():
    tasks = [task(length) for length in (5, 1, 3, 2)]
    shares = share_out(tasks, 2)
    assert sorted(id(one) for share in shares for one in share) == sorted(id(one) for one in tasks)
    assert [sum(len(one.sample.tokens) for one in share) for share in shares] == [10, 9]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_without_samples_gets_one_that_counts_for_nothing(num_ranks):
    only = task(3)
    shares = share_out([only], num_ranks)
    assert len(shares) == num_ranks
    assert sum(one is only for share in shares for one in share) == 1
    idle = [one for share in shares for one in share if one is not only]
    assert len(idle) == num_ranks - 1
    for one in idle:
        assert (one.sample.tokens, one.sample.loss_mask) == (only.sample.tokens, [0, 0, 0])
        assert (one.advantage, one.loss_scale) == (0.0, 0.0)
    assert only.sample.loss_mask == [1, 1, 1]
