"""Live progress on a terminal, one plain line a step elsewhere."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SHOWN = (
    ("reward", "rollout/reward_mean", "{:.3f}"),
    ("accuracy", "eval/accuracy", "{:.3f}"),
    ("tokens", "rollout/response_tokens_mean", "{:.1f}"),
    ("gap", "gap/mean_abs_with_replay", "{:.2g}"),
    ("loss", "train/loss", "{:+.3g}"),
    ("s/step", "time/total_s", "{:.2f}"),
)
"""(label, metric, format) in the order shown; a metric that a step lacks keeps its last value."""


class RunProgress:
    """A context manager around a run; `update` after each step. Writes to standard error."""

    def __init__(
        self, title: str, total_steps: int, *, first_step: int = 0, console: Console | None = None
    ) -> None:
        self._console = console or Console(stderr=True)
        self._title = title
        self._total_steps = total_steps
        self._last: dict[str, str] = {}
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}", style="cyan"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=total_steps, completed=first_step, figures="")
        self._previous_s = time.perf_counter()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step` steps are done; `metrics` are the last one's."""
        now = time.perf_counter()
        shown = dict(metrics) | {"time/total_s": now - self._previous_s}
        self._previous_s = now
        self._last |= {label: form.format(shown[name]) for label, name, form in SHOWN if name in shown}
        figures = "  ".join(f"{label} {value}" for label, value in self._last.items())
        self._bar.update(self._task, completed=step, figures=figures)
        if not self._console.is_terminal:
            self._console.print(
                f"{self._title}: step {step}/{self._total_steps}  {figures}", highlight=False, soft_wrap=True
            )

    def __enter__(self) -> Self:
        self._bar.start()
        self._previous_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
