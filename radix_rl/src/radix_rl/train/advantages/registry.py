"""Advantage estimators by name."""

from collections.abc import Callable

import numpy as np

from radix_rl.train.advantages import dr_grpo, grpo, reinforce_pp, rloo

Estimator = Callable[[np.ndarray, np.ndarray], np.ndarray]

ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo.advantages,
    "dr_grpo": dr_grpo.advantages,
    "rloo": rloo.advantages,
    "reinforce_pp": reinforce_pp.advantages,
}


def compute_advantages(name: str, rewards: list[float], group_ids: list[int]) -> np.ndarray:
    """`[n]` float64. Raises ValueError for a reward that is not finite."""
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        position = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(
            f"reward of sample {position} (group {group_ids[position]}) is {values[position]}; not finite"
        )
    return ESTIMATORS[name](values, np.asarray(group_ids))
