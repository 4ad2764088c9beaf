"""`NoSignalWarning`: tells when steps in a row cannot change the policy."""

import logging
from collections.abc import Sequence

from radix_rl.train.plan.step_plan import SampleTask

logger = logging.getLogger(__name__)

STEPS_IN_A_ROW = 3
"""Before the first warning; the next one comes after twice as many, and so on."""
NO_ADVANTAGE = 1e-6
"""Advantages up to this are rounding of a mean over equal rewards."""


class NoSignalWarning:
    """Counts the steps in a row in which every advantage is 0."""

    def __init__(self) -> None:
        self._steps = 0
        self._warn_at = STEPS_IN_A_ROW

    def after_plan(self, step: int, plan: Sequence[Sequence[SampleTask]]) -> None:
        """Look at the plan of the step that makes `step` steps done."""
        tasks = [task for minibatch in plan for task in minibatch]
        if any(abs(task.advantage) > NO_ADVANTAGE for task in tasks):
            self._steps, self._warn_at = 0, STEPS_IN_A_ROW
            return
        self._steps += 1
        if self._steps == self._warn_at:
            self._warn_at *= 2
            rewards = [task.sample.reward or 0.0 for task in tasks]
            logger.warning(
                "step %d: for %d steps in a row no group had unequal rewards (the last: %g to %g); nothing "
                "was learned. Does `score` find the answer, is max_new_tokens enough? Use easier or harder "
                "problems, or raise rollout.samples_per_prompt",
                step,
                self._steps,
                min(rewards),
                max(rewards),
            )
