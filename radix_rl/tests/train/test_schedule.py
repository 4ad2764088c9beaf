"""Learning rates against numbers worked out by hand."""

import pytest

from radix_rl.config.optimizer import OptimizerConfig
from radix_rl.train.schedule import learning_rate


def rates(total_steps, **settings):
    config = OptimizerConfig(lr=8.0, **settings)
    return [learning_rate(config, step, total_steps) for step in range(total_steps)]


def test_a_linear_schedule_would_be_at_its_minimum_one_step_after_the_last():
    assert rates(4, schedule="linear") == [8, 6, 4, 2]
    assert rates(4, schedule="linear", min_lr_ratio=0.5) == [8, 7, 6, 5]


def test_a_cosine_schedule_falls_slowly_at_both_ends_and_trains_in_its_last_step():
    assert rates(4, schedule="cosine") == pytest.approx([8, 4 + 8**0.5, 4, 4 - 8**0.5])


def test_the_warm_up_comes_first_and_the_schedule_starts_after_it_at_the_whole_rate():
    assert rates(4, schedule="linear", warmup_steps=2) == [4, 8, 8, 4]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("total_steps", [1, 2, 5])
def test_no_step_trains_at_zero(schedule, total_steps):
    assert min(rates(total_steps, schedule=schedule)) > 0
