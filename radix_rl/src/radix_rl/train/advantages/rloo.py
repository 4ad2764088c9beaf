"""RLOO (Ahmadian et al. 2024): reward minus the mean of the other samples of the group."""

import numpy as np

from radix_rl.train.advantages.groups import group_mean_and_count


def advantages(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """(r - mean) * n / (n - 1), which is the leave-one-out baseline.

    0 for groups of one, which have no other sample.
    """
    means, counts = group_mean_and_count(rewards, group_ids)
    return (rewards - means) * counts / np.maximum(counts - 1, 1)
