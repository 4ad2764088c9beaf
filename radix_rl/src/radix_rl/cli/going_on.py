"""What an interrupted run kept, and the command that goes on with it."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from radix_rl.config import RunConfig
from radix_rl.train.checkpoint import find_checkpoint

_RESUME = "checkpoint.resume="


def how_to_go_on(settings: RunConfig, config: Path, overrides: Sequence[str]) -> str:
    """The newest checkpoint and a command; `config` and `overrides` are those of the run."""
    checkpoint = find_checkpoint("latest", settings.output_dir / "checkpoints")
    began_elsewhere = settings.checkpoint.resume not in ("never", "latest")
    if checkpoint is None and began_elsewhere:
        kept = f"no checkpoint was saved after {settings.checkpoint.resume}"
    else:
        overrides = [*(text for text in overrides if not text.startswith(_RESUME)), f"{_RESUME}latest"]
        kept = f"{checkpoint} is kept" if checkpoint else "no checkpoint was saved, so that it begins again"
    command = shlex.join(["radix-rl", "train", str(config), *overrides])
    return f"{kept}; go on with\n  {command}"
