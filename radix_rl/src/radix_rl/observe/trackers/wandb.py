"""Weights & Biases."""

from collections.abc import Mapping

from radix_rl.config import RunConfig
from radix_rl.config.observe import WandbTrackerConfig
from radix_rl.errors import ConfigurationError
from radix_rl.observe.trackers.base import Tracker


class WandbTracker(Tracker):
    """A Weights & Biases run with this run's configuration."""

    def __init__(self, settings: WandbTrackerConfig, config: RunConfig) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigurationError(
                "observe.trackers: wandb is not installed: pip install 'radix-rl[wandb]'"
            ) from error
        try:
            self._run = wandb.init(
                project=settings.project,
                name=settings.name or config.output_dir.name,
                mode=settings.mode,
                dir=str(config.output_dir),
                config=config.model_dump(mode="json"),
            )
        except (wandb.Error, OSError) as error:
            raise ConfigurationError(
                f'observe.trackers: wandb cannot start: {error}; log in, or set mode = "offline"'
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
