"""The trackers of a run. Optional libraries are imported by the one that needs them."""

from collections.abc import Mapping
from contextlib import ExitStack

from radix_rl.config import RunConfig
from radix_rl.config.observe import TensorboardTrackerConfig, TrackerConfig
from radix_rl.observe.metrics import FILE_NAME
from radix_rl.observe.trackers.base import Tracker
from radix_rl.observe.trackers.json_lines import JsonLinesTracker


class TrackerGroup(Tracker):
    """Several as one; owns them."""

    def __init__(self, stack: ExitStack, trackers: list[Tracker]) -> None:
        self._stack = stack
        self._trackers = trackers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        self._stack.close()


def create_trackers(config: RunConfig) -> TrackerGroup:
    """metrics.jsonl, and the configured others. Raises ConfigurationError for a library that is not
    installed."""
    with ExitStack() as stack:
        trackers: list[Tracker] = [
            stack.enter_context(JsonLinesTracker(config.output_dir / FILE_NAME)),
            *(stack.enter_context(_create(settings, config)) for settings in config.observe.trackers),
        ]
        return TrackerGroup(stack.pop_all(), trackers)


def _create(settings: TrackerConfig, config: RunConfig) -> Tracker:
    if isinstance(settings, TensorboardTrackerConfig):
        from radix_rl.observe.trackers.tensorboard import TensorboardTracker

        return TensorboardTracker(settings.log_dir or config.output_dir / "tensorboard")
    from radix_rl.observe.trackers.wandb import WandbTracker

    return WandbTracker(settings, config)
