"""`[observe]`: where metrics go besides metrics.jsonl."""

from typing import Annotated, Literal

from pydantic import Field

from radix_rl.config.base import FilePath, Section


class TensorboardTrackerConfig(Section):
    """TensorBoard event files; needs the extra `tensorboard`."""

    type: Literal["tensorboard"] = "tensorboard"
    log_dir: FilePath | None = None
    """Unset: `<output_dir>/tensorboard`."""


class WandbTrackerConfig(Section):
    """Weights & Biases; needs the extra `wandb`."""

    type: Literal["wandb"] = "wandb"
    project: str
    name: str | None = None
    mode: Literal["online", "offline"] = "online"


TrackerConfig = Annotated[TensorboardTrackerConfig | WandbTrackerConfig, Field(discriminator="type")]


class ObserveConfig(Section):
    """Metrics and report. `<output_dir>/metrics.jsonl` is always written."""

    trackers: tuple[TrackerConfig, ...] = ()
    report: bool = True
    """Write `<output_dir>/report.html` when the run ends."""
