"""`[checkpoint]`: saving and resuming."""

from typing import Literal

from pydantic import Field

from radix_rl.config.base import FilePath, Section


class CheckpointConfig(Section):
    """Checkpoints lie in `<output_dir>/checkpoints/step-N`; each is complete or absent."""

    every_steps: int = Field(default=0, ge=0)
    """0: only after the last step."""
    keep: int = Field(default=2, ge=1)
    """The so many that were written last stay."""
    resume: Literal["never", "latest"] | FilePath = "never"
    """latest: the newest checkpoint of the output directory, if it has one. A path: that checkpoint."""
    save_on_interrupt: bool = False
    """true: Ctrl-C and SIGTERM save a checkpoint of the last step that trained before they end the run; a
    step in training is finished first. false: they end it at once."""
