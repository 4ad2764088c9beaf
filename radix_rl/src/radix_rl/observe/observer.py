"""`RunObserver`: configuration, metrics, progress, summary and report of one run."""

import logging
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from radix_rl.config import RunConfig, to_toml
from radix_rl.config.saving import FILE_NAME as CONFIG_FILE
from radix_rl.errors import ConfigurationError
from radix_rl.observe.metrics import FILE_NAME as METRICS_FILE
from radix_rl.observe.metrics import read_metrics
from radix_rl.observe.progress import RunProgress
from radix_rl.observe.quiet import quiet_transformers
from radix_rl.observe.report import write_report
from radix_rl.observe.summary import summarize, write_summary
from radix_rl.observe.tolerance import Tolerance
from radix_rl.observe.trackers.factory import create_trackers
from radix_rl.observe.whole_file import write_whole

logger = logging.getLogger(__name__)


class RunObserver:
    """A context manager around a run; `log` after each step, `finish` when all steps are done.

    Once it is entered, nothing that fails in it ends the run: the first failure of each part is a warning.
    """

    def __init__(self, config: RunConfig, *, first_step: int, show_progress: bool) -> None:
        self._config = config
        self._first_step = first_step
        self._show_progress = show_progress
        self._tolerance = Tolerance()
        self._stack = ExitStack()
        self._started_s = time.perf_counter()

    def __enter__(self) -> Self:
        """Write config.toml and open the trackers.

        Raises ConfigurationError for a directory that cannot be written and for a tracker that cannot start.
        """
        folder = self._config.output_dir
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / CONFIG_FILE, to_toml(self._config).encode())
        except OSError as error:
            raise ConfigurationError(
                f"output_dir: cannot write into {str(folder)!r}: {error.strerror}; name another directory"
            ) from error
        with ExitStack() as stack:
            self._trackers = stack.enter_context(create_trackers(self._config, self._tolerance))
            self._progress = None
            if self._show_progress:
                stack.enter_context(quiet_transformers())
                total = self._config.train.steps
                self._progress = stack.enter_context(
                    RunProgress(folder.name, total, first_step=self._first_step)
                )
            self._stack = stack.pop_all()
        self._tell_key_prefix()
        return self

    def _tell_key_prefix(self) -> None:
        """What finds the stored outputs of a run that was killed is on the console from the first second."""
        if (prefix := self._config.output_store.key_prefix) is None:
            return
        text = f"stored outputs have the key prefix {prefix}"
        if self._progress is None:
            logger.info(text)
        else:
            self._progress.note(text)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._tolerance.of("closing progress and trackers"):
            self._stack.close()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """`step` steps are done; `metrics` are the last one's."""
        self._trackers.log(step, metrics)
        if self._progress is not None:
            with self._tolerance.of("the progress display"):
                self._progress.update(step, metrics)

    def finish(self, objects_left: int | None) -> tuple[dict[str, Any], tuple[Path, ...]]:
        """Write summary.json and, if configured, report.html; the summary and the files that were written."""
        folder = self._config.output_dir
        summary: dict[str, Any] = {}
        written: list[Path] = []
        with self._tolerance.of("reading the metrics back"):
            summary |= summarize(read_metrics(folder / METRICS_FILE))
        if objects_left is not None:
            summary["objects_left"] = objects_left
        if (prefix := self._config.output_store.key_prefix) is not None:
            summary["key_prefix"] = prefix
        summary["seconds"] = time.perf_counter() - self._started_s
        with self._tolerance.of("writing the summary"):
            written.append(write_summary(folder, summary))
        if self._config.observe.report:
            with self._tolerance.of("writing the report"):
                written.append(write_report(folder))
        return summary, tuple(written)
