"""The demo: a tiny MoE learns to carry, with its routing replayed through the output store.

    python examples/demo/run.py [key.path=value ...]

Writes runs/demo/: the model, metrics, summary.json and report.html. Exits with 1 when a claim does not hold.
"""

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from radix_rl.errors import ConfigurationError, RadixError
from radix_transfer_plugins.errors import OutputStoreError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).with_name("config.toml")

MIN_ACCURACY_GAIN = 0.25
MIN_K3_RATIO = 2.0
SUMMARY_KEYS = (
    "accuracy_before",
    "accuracy_after",
    "mismatch_with_replay",
    "mismatch_without_replay",
    "k3_with_replay",
    "k3_without_replay",
    "router_disagreement",
    "response_bytes_inline",
    "response_bytes_store",
    "objects_left",
    "seconds",
)


def main(overrides: Sequence[str]) -> int:
    try:
        return run_demo(overrides)
    except (RadixError, OutputStoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1


def run_demo(overrides: Sequence[str]) -> int:
    """0 if every claim holds, else 1. Raises RadixError, OutputStoreError."""
    started = time.perf_counter()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    console = Console(stderr=True)
    # A model this small gains little from a second thread, and loses much when another process wants the
    # core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console.print("Loading PyTorch and transformers ...")
    from transformers.utils.logging import disable_progress_bar
    from warm_start import STEPS, warm_start

    from radix_rl.config import load_config
    from radix_rl.observe.summary import write_summary
    from radix_rl.train.run import train

    config = load_config(CONFIG, [f"output_dir={ROOT / 'runs/demo'}", *overrides])
    folder = config.output_dir
    remove_earlier_demo(folder)
    model_path = folder / "warm-start"
    config = load_config(CONFIG, [f"output_dir={folder}", *overrides, f"model.path={model_path}"])

    disable_progress_bar()
    environment = config.environment.model_dump(exclude={"type"})
    with warm_start_progress(console, STEPS) as show:
        parameters = warm_start(model_path, environment, config.seed, show)
    console.print(
        f"warm start: {parameters / 1e6:.2f} million parameters, {time.perf_counter() - started:.0f} s"
    )
    measured = train(config).summary | {"seconds": time.perf_counter() - started}
    if missing := [key for key in SUMMARY_KEYS if key not in measured]:
        raise ConfigurationError(f"the overrides left these figures unmeasured: {', '.join(missing)}")
    summary = {key: measured[key] for key in SUMMARY_KEYS} | {"report": str(folder / "report.html")}
    write_summary(folder, summary)
    return show_results(summary)


def remove_earlier_demo(folder: Path) -> None:
    """Raises ConfigurationError for a folder that holds something else."""
    if not folder.exists():
        return
    if any(folder.iterdir()) and not (folder / "warm-start").is_dir():
        raise ConfigurationError(
            f"output_dir: {str(folder)!r} holds no earlier demo and is not removed; name another directory"
        )
    shutil.rmtree(folder)


@contextmanager
def warm_start_progress(console: Console, total_steps: int) -> Iterator[Callable[[int, float], None]]:
    """Takes (steps done, loss): a bar on a terminal, a line now and then elsewhere."""
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    loss_column = TextColumn("loss {task.fields[loss]:.3f}", style="cyan")
    with Progress(*columns, loss_column, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("warm start", total=total_steps, loss=float("nan"))

        def show(step: int, loss: float) -> None:
            bar.update(task, completed=step, loss=loss)
            if not console.is_terminal and step % 20 == 0:
                console.print(f"warm start: step {step}/{total_steps}  loss {loss:.3f}", highlight=False)

        yield show


def show_results(summary: Mapping[str, float | str]) -> int:
    """Print what was measured; 0 if every claim holds."""
    claims = check_claims(summary)
    table = Table(title="What the demo showed", title_justify="left")
    table.add_column("")
    table.add_column("")
    table.add_column("holds")
    for name, figures, holds in claims:
        table.add_row(name, figures, "yes" if holds else "[bold red]NO[/]")
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(f"report: {summary['report']}", soft_wrap=True)
    console.print(f"{summary['seconds']:.0f} s in all")
    return 0 if all(holds for _, _, holds in claims) else 1


def check_claims(summary: Mapping) -> list[tuple[str, str, bool]]:
    """(what is claimed, the figures, whether it holds)"""
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    with_replay, without = summary["mismatch_with_replay"], summary["mismatch_without_replay"]
    k3_with, k3_without = summary["k3_with_replay"], summary["k3_without_replay"]
    inline, store = summary["response_bytes_inline"], summary["response_bytes_store"]
    return [
        (
            f"RL raises held-out accuracy by at least {MIN_ACCURACY_GAIN}",
            f"{before:.1%} -> {after:.1%}",
            after - before >= MIN_ACCURACY_GAIN,
        ),
        (
            "engine and trainer, left alone, route differently",
            f"{summary['router_disagreement']:.1%} of token-layers",
            summary["router_disagreement"] > 0,
        ),
        (
            f"replay makes their KL estimate (k3) at least {MIN_K3_RATIO:g} times smaller",
            f"{k3_without:.2e} -> {k3_with:.2e}, {k3_without / k3_with:.1f} times",
            k3_without >= MIN_K3_RATIO * k3_with,
        ),
        (
            "and the mean mismatch of their log-probabilities smaller",
            f"{without:.2e} -> {with_replay:.2e}, {without / with_replay:.1f} times",
            with_replay < without,
        ),
        (
            "references in the answers are smaller than the arrays",
            f"{inline / 2**20:.1f} MiB -> {store / 2**20:.1f} MiB",
            store < inline,
        ),
        ("no object is left in the store", f"{summary['objects_left']:.0f}", summary["objects_left"] == 0),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
