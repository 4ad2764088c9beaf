"""REINFORCE++ (Hu 2025): rewards normalised over the whole batch, whatever their groups."""

import numpy as np

EPSILON = 1e-6


def advantages(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """(r - mean) / (std + 1e-6) over all samples, with the population standard deviation."""
    return (rewards - rewards.mean()) / (rewards.std() + EPSILON)
