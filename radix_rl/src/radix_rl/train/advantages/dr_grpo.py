"""Dr.GRPO (Liu et al. 2025): reward minus the group's mean.

Without GRPO's division, which favours easy and hard prompts.
"""

import numpy as np

from radix_rl.train.advantages.groups import group_mean_and_count


def advantages(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """r - mean; 0 for groups of one."""
    means, _ = group_mean_and_count(rewards, group_ids)
    return rewards - means
