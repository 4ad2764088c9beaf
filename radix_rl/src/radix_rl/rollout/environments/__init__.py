"""Problems to solve, by configuration."""

from radix_rl.rollout.environments.factory import create_environment

__all__ = ["create_environment"]
