"""Environments by the `type` of their settings."""

from collections.abc import Callable
from typing import Any

from radix_rl.config.environment import EnvironmentConfig
from radix_rl.rollout.environments import arithmetic, gsm8k
from radix_rl.rollout.environments.base import Environment

ENVIRONMENTS: dict[str, Callable[[Any, Any, int], Environment]] = {
    "arithmetic": arithmetic.create,
    "gsm8k": gsm8k.create,
}
"""Each takes its settings, the model's tokenizer and the run's seed."""


def create_environment(config: EnvironmentConfig, tokenizer: Any, *, seed: int = 0) -> Environment:
    """The configured environment; `tokenizer` is the model's, `seed` the run's.

    Raises DataError for data that cannot be used.
    """
    return ENVIRONMENTS[config.type](config, tokenizer, seed)
