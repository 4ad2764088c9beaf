"""What `radix-rl train` does around a run: progress, trackers, summary and report."""

import time
from pathlib import Path

import typer

from radix_rl.config import RunConfig
from radix_rl.errors import ConfigurationError
from radix_rl.launch.checks import check_launch
from radix_rl.observe.metrics import FILE_NAME as METRICS_FILE
from radix_rl.observe.metrics import read_metrics
from radix_rl.observe.progress import RunProgress
from radix_rl.observe.report import CONFIG_FILE, write_report
from radix_rl.observe.summary import summarize, write_summary
from radix_rl.observe.trackers.factory import create_trackers
from radix_rl.train.checkpoint import find_checkpoint, read_state
from radix_rl.train.run import train


def run_training(config: RunConfig) -> None:
    """Train, then write summary.json and report.html into the output directory. Raises RadixError,
    OutputStoreError."""
    started = time.perf_counter()
    output_dir = config.output_dir
    if config.checkpoint.resume == "never" and _holds_a_run(output_dir):
        raise ConfigurationError(
            f"output_dir: {str(output_dir)!r} holds a run already; name another directory, remove it, or go "
            "on with it by "
            "checkpoint.resume=latest"
        )
    checkpoint = find_checkpoint(config.checkpoint.resume, output_dir / "checkpoints")
    first_step = read_state(checkpoint).step if checkpoint else 0
    check_launch(config)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / CONFIG_FILE).write_text(config.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise ConfigurationError(
            f"output_dir: cannot write into {str(output_dir)!r}: {error.strerror}; name another directory"
        ) from error
    with (
        create_trackers(config) as trackers,
        RunProgress(output_dir.name, config.train.steps, first_step=first_step) as progress,
    ):

        def log(step: int, metrics: dict[str, float]) -> None:
            trackers.log(step, metrics)
            progress.update(step, metrics)

        outcome = train(config, log)
    summary = summarize(read_metrics(output_dir / METRICS_FILE))
    summary |= {"objects_left": outcome.objects_left, "seconds": time.perf_counter() - started}
    typer.echo(f"wrote {write_summary(output_dir, summary)}")
    if config.observe.report:
        typer.echo(f"wrote {write_report(output_dir)}")


def _holds_a_run(output_dir: Path) -> bool:
    """Whether there is a step or a checkpoint to lose; a run that failed to start leaves neither."""
    metrics = output_dir / METRICS_FILE
    has_steps = metrics.is_file() and metrics.stat().st_size > 0
    return has_steps or find_checkpoint("latest", output_dir / "checkpoints") is not None
