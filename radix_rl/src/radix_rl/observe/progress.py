"""Live progress on a terminal, one plain line a step elsewhere."""

import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

SHOWN = (
    ("reward", "rollout/reward_mean", "{:.3f}"),
    ("equal groups", "rollout/equal_groups_share", "{:.0%}"),
    ("accuracy", "eval/accuracy", "{:.1%}"),
    ("tokens", "rollout/response_tokens_mean", "{:.1f}"),
    ("tokens/s", "rollout/tokens_per_second", "{:.0f}"),
    ("entropy", "rollout/entropy", "{:.3g}"),
    ("mismatch", "mismatch/mean_abs_with_replay", "{:.2g}"),
    ("loss", "train/loss", "{:+.3g}"),
    ("s/step", "time/total_s", "{:.2f}"),
)
"""(label, metric, format) in the order shown."""


class RunProgress:
    """A context manager around a run; `update` after each step. Writes to standard error."""

    def __init__(
        self, title: str, total_steps: int, *, first_step: int = 0, console: Console | None = None
    ) -> None:
        self._console = console or Console(stderr=True)
        self._title = title
        self._total_steps = total_steps
        self._measured: dict[str, tuple[int, str]] = {}
        self._bar = _BarAboveFigures(
            TextColumn("[bold]{task.description}", table_column=Column(overflow="ellipsis", no_wrap=True)),
            BarColumn(bar_width=None),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
            TextColumn("left"),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
            console=self._console,
            disable=not self._console.is_terminal,
            expand=True,
        )
        self._task = self._bar.add_task(title, total=total_steps, completed=first_step)
        self._previous_s = time.perf_counter()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of the last of `step` steps.

        A plain line holds what this step measured. The bar keeps older figures with the step they are from.
        """
        now = time.perf_counter()
        shown = dict(metrics)
        # Step 0 is the evaluation before the first step.
        if step > 0:
            shown["time/total_s"] = now - self._previous_s
        self._previous_s = now
        self._measured |= {
            label: (step, form.format(shown[name])) for label, name, form in SHOWN if name in shown
        }
        if self._console.is_terminal:
            self._bar.figures = self._figures(step, keep_older=True)
            self._bar.update(self._task, completed=step)
        else:
            figures = self._figures(step, keep_older=False)
            self._console.print(
                f"{self._title}: step {step}/{self._total_steps}  {figures}", highlight=False, soft_wrap=True
            )

    def note(self, text: str) -> None:
        """Print a line that stays above the bar."""
        self._console.print(f"{self._title}: {text}", highlight=False, markup=False, soft_wrap=True)

    def _figures(self, step: int, *, keep_older: bool) -> str:
        parts = []
        for label, _, _ in SHOWN:
            measured_at, text = self._measured.get(label, (None, ""))
            if measured_at == step:
                parts.append(f"{label} {text}")
            elif measured_at is not None and keep_older:
                parts.append(f"{label} {text} (step {measured_at})")
        return "  ".join(parts)

    def __enter__(self) -> Self:
        self._bar.start()
        self._previous_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class _BarAboveFigures(Progress):
    """A bar with a line of figures below, so that neither takes the other's room on a narrow terminal."""

    figures = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.figures:
            yield Text(self.figures, style="cyan")
