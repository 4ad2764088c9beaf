"""TensorBoard event files."""

from collections.abc import Mapping

from radix_rl.config import RunConfig
from radix_rl.config.observe import TensorboardTrackerConfig
from radix_rl.errors import ConfigurationError
from radix_rl.observe.trackers.base import Tracker


class TensorboardTracker(Tracker):
    """A scalar a metric, on disk after each step."""

    def __init__(self, settings: TensorboardTrackerConfig, config: RunConfig) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ConfigurationError(
                "observe.trackers: tensorboard is not installed: pip install 'radix-rl[tensorboard]'"
            ) from error
        log_dir = settings.log_dir or config.output_dir / "tensorboard"
        try:
            self._writer = SummaryWriter(str(log_dir))
        except OSError as error:
            raise ConfigurationError(
                f"observe.trackers: tensorboard cannot write into {str(log_dir)!r}: {error.strerror}; "
                "set log_dir to another folder"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
