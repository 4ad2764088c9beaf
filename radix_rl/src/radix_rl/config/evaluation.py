"""`[eval]`: accuracy on held-out problems."""

from pydantic import Field

from radix_rl.config.base import Section
from radix_rl.config.rollout import SamplingConfig


class EvalConfig(Section):
    """Evaluation before the first step, every so many steps, and after the last."""

    every_steps: int = Field(default=0, ge=0)
    """0: never evaluate."""
    num_problems: int | None = Field(default=None, ge=1)
    """The first so many held-out problems. Unset: all."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
