"""Statistics of groups of samples of one prompt."""

import numpy as np


def group_mean_and_count(values: np.ndarray, group_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each sample the mean of its group's values and the size of its group, both `[n]`."""
    _, inverse, counts = np.unique(group_ids, return_inverse=True, return_counts=True)
    sums = np.bincount(inverse, weights=values)
    return (sums / counts)[inverse], counts[inverse]
