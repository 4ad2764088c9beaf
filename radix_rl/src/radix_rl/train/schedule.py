"""Learning rate as a function of the optimizer step: no state to save, so resuming cannot lose it."""

import math

from radix_rl.config.optimizer import OptimizerConfig


def learning_rate(config: OptimizerConfig, optimizer_step: int, total_steps: int) -> float:
    """Rate of step `optimizer_step` (from 0) of `total_steps`: linear warm-up, then the configured schedule.

    A linear or cosine schedule would arrive at `min_lr_ratio` one step after the last, so that no step trains
    at 0.
    """
    if optimizer_step < config.warmup_steps:
        return config.lr * (optimizer_step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(total_steps - config.warmup_steps, 1)
    progress = min((optimizer_step - config.warmup_steps) / span, 1.0)
    share = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)
