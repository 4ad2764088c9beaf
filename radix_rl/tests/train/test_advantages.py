"""Advantage estimators against numbers worked out by hand."""

from typing import get_args

import numpy as np
import pytest

from radix_rl.config.algorithm import AlgorithmConfig
from radix_rl.train.advantages.registry import ESTIMATORS, compute_advantages

GROUPS = [0, 0, 0, 7, 7, 3]
REWARDS = [1.0, 0.0, 2.0, 4.0, 4.0, 5.0]


def test_grpo_divides_by_the_groups_sample_deviation():
    # Group 0: mean 1, sample deviation 1. Group 7: equal rewards. Group 3: one sample.
    found = compute_advantages("grpo", REWARDS, GROUPS)
    np.testing.assert_allclose(found, [0, -1, 1, 0, 0, 0], atol=2e-6)


def test_dr_grpo_only_subtracts_the_mean():
    found = compute_advantages("dr_grpo", [3.0, 0.0, 0.0, 4.0], [0, 0, 0, 1])
    np.testing.assert_allclose(found, [2, -1, -1, 0])


def test_rloo_subtracts_the_mean_of_the_other_samples():
    # 3 - (0 + 1) / 2, 0 - (3 + 1) / 2, 1 - (3 + 0) / 2; a single sample has no other.
    found = compute_advantages("rloo", [3.0, 0.0, 1.0, 4.0], [0, 0, 0, 1])
    np.testing.assert_allclose(found, [2.5, -2, -0.5, 0])


def test_reinforce_pp_normalises_over_the_whole_batch():
    # Mean 3, population deviation sqrt((4 + 0 + 4) / 3).
    found = compute_advantages("reinforce_pp", [1.0, 3.0, 5.0], [0, 1, 2])
    np.testing.assert_allclose(found, [-1.2247449, 0, 1.2247449], atol=2e-6)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_equal_rewards_teach_nothing(name):
    found = compute_advantages(name, [2.0] * 4, [0, 0, 1, 1])
    np.testing.assert_allclose(found, 0, atol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_group_estimators_do_not_depend_on_the_order_of_samples(name):
    order = [4, 1, 5, 0, 3, 2]
    found = compute_advantages(name, REWARDS, GROUPS)
    shuffled = compute_advantages(name, [REWARDS[i] for i in order], [GROUPS[i] for i in order])
    np.testing.assert_allclose(shuffled, found[order])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_with_its_sample(value):
    with pytest.raises(ValueError, match=r"reward of sample 1 \(group 9\)"):
        compute_advantages("grpo", [1.0, value], [9, 9])


def test_every_estimator_that_can_be_configured_is_registered():
    assert set(get_args(AlgorithmConfig.model_fields["advantage"].annotation)) == set(ESTIMATORS)
