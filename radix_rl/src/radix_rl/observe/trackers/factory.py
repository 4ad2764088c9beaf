"""The trackers of a run by the `type` of their settings.

Optional libraries are imported by the tracker that needs them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from radix_rl.config import RunConfig
from radix_rl.observe.metrics import FILE_NAME
from radix_rl.observe.tolerance import Tolerance
from radix_rl.observe.trackers.base import Tracker
from radix_rl.observe.trackers.json_lines import JsonLinesTracker
from radix_rl.observe.trackers.tensorboard import TensorboardTracker
from radix_rl.observe.trackers.wandb import WandbTracker

TRACKERS: dict[str, Callable[[Any, RunConfig], Tracker]] = {
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
}
"""Each takes its settings and the run's."""


class TrackerGroup(Tracker):
    """Several trackers as one, which owns them.

    A tracker that fails is left to `tolerance`; it is tried again on the next step, and the others go on.
    """

    def __init__(self, trackers: Sequence[Tracker], tolerance: Tolerance) -> None:
        self._trackers = trackers
        self._tolerance = tolerance

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            with self._tolerance.of(type(tracker).__name__):
                tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            with self._tolerance.of(type(tracker).__name__):
                tracker.close()


def create_trackers(config: RunConfig, tolerance: Tolerance) -> TrackerGroup:
    """metrics.jsonl and the configured trackers.

    Raises ConfigurationError for a library that is not installed and for a tracker that cannot start.
    """
    with ExitStack() as stack:
        trackers: list[Tracker] = [stack.enter_context(JsonLinesTracker(config.output_dir / FILE_NAME))]
        trackers += [
            stack.enter_context(TRACKERS[settings.type](settings, config))
            for settings in config.observe.trackers
        ]
        stack.pop_all()
        return TrackerGroup(trackers, tolerance)
