"""GRPO (Shao et al. 2024): reward minus the group's mean, over the group's standard deviation."""

import numpy as np

from radix_rl.train.advantages.groups import group_mean_and_count

EPSILON = 1e-6


def advantages(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """(r - mean) / (std + 1e-6) with the sample standard deviation (n - 1).

    0 for groups of one and for equal rewards.
    """
    means, counts = group_mean_and_count(rewards, group_ids)
    centred = rewards - means
    mean_squares, _ = group_mean_and_count(centred**2, group_ids)
    deviations = np.sqrt(mean_squares * counts / np.maximum(counts - 1, 1))
    return centred / (deviations + EPSILON)
