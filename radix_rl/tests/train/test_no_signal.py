"""Steps that teach nothing are told of, and how many groups were equal."""

import logging

import pytest

from radix_rl.rollout.metrics import equal_groups, sampled_entropy
from radix_rl.rollout.replay_index import ReplayIndex
from radix_rl.rollout.sample import Sample
from radix_rl.train.plan.no_signal import NoSignalWarning
from radix_rl.train.plan.step_plan import SampleTask
from radix_rl.types import FinishReason


def sample(group_id=0, reward=0.0, logprobs=(-1.0,), loss_mask=(1,)):
    return Sample(
        group_id=group_id,
        index=0,
        tokens=[1, *range(2, 2 + len(logprobs))],
        prompt_tokens=1,
        loss_mask=list(loss_mask),
        rollout_logprobs=list(logprobs),
        version_spans=[],
        finish_reason=FinishReason(type="stop"),
        replay=ReplayIndex(),
        reward=reward,
    )


def plan(*advantages):
    return [[SampleTask(sample=sample(reward=0.5), advantage=value, loss_scale=1.0) for value in advantages]]


@pytest.fixture
def warned(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [int(message.split()[1].rstrip(":")) for message in caplog.messages]


def test_three_steps_without_an_advantage_warn_and_then_ever_more_rarely(warned):
    warning = NoSignalWarning()
    for step in range(1, 25):
        warning.after_plan(step, plan(0.0, 1e-11))
    assert warned() == [3, 6, 12, 24]


def test_a_step_that_teaches_starts_the_count_anew(warned):
    warning = NoSignalWarning()
    for step, advantage in enumerate([0.0, 0.0, 0.5, 0.0, 0.0, 0.0], start=1):
        warning.after_plan(step, plan(advantage, 0.0))
    assert warned() == [6]


def test_the_warning_names_the_rewards_and_what_to_look_at(caplog):
    warning = NoSignalWarning()
    for step in range(3):
        warning.after_plan(step, plan(0.0))
    assert "0.5 to 0.5" in caplog.text
    assert "rollout.samples_per_prompt" in caplog.text


def test_groups_whose_rewards_are_all_equal_are_found():
    samples = [sample(0, 1.0), sample(0, 0.0), sample(1, 0.0), sample(1, 0.0), sample(2, 1.0), sample(2, 1.0)]
    assert equal_groups(samples) == {1, 2}


def test_entropy_is_the_mean_surprise_of_the_tokens_that_count():
    samples = [sample(logprobs=(-1.0, -9.0, -2.0), loss_mask=(1, 0, 1)), sample(logprobs=(-6.0,))]
    assert sampled_entropy(samples) == 3.0
