"""Environments by the type of their configuration."""

from typing import Any

from radix_rl.config.environment import EnvironmentConfig
from radix_rl.rollout.environments.base import Environment


def create_environment(config: EnvironmentConfig, tokenizer: Any, *, seed: int = 0) -> Environment:
    """`tokenizer` is the model's, `seed` the run's. Raises DataError for data that cannot be used."""
    match config.type:
        case "arithmetic":
            from radix_rl.rollout.environments.arithmetic import ArithmeticEnvironment

            return ArithmeticEnvironment(
                tokenizer,
                max_operand=config.max_operand,
                carry_share=config.carry_share,
                num_eval_problems=config.num_eval_problems,
                seed=seed,
            )
        case "gsm8k":
            from radix_rl.rollout.environments.gsm8k import Gsm8kEnvironment, load_records

            return Gsm8kEnvironment(
                load_records(config, "train"),
                load_records(config, "test"),
                tokenizer,
                system_prompt=config.system_prompt,
                seed=seed,
            )
