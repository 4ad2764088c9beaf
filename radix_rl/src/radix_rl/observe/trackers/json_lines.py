"""`metrics.jsonl`: every step is on disk before the next one begins."""

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from radix_rl.errors import ConfigurationError
from radix_rl.observe.trackers.base import Tracker

logger = logging.getLogger(__name__)


class JsonLinesTracker(Tracker):
    """Appends a line a step, so that a resumed run goes on in the same file.

    Values that are not finite become null: JSON has no NaN. A line that could not be written whole, as on a
    full disk, is taken back.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` to append. Raises ConfigurationError if it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_torn_line(path)
            # Unbuffered: a line that failed must not wait in a buffer for the next one.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigurationError(
                f"output_dir: cannot write {str(path)!r}: {error.strerror}; name another directory"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        odd = [name for name, value in metrics.items() if not math.isfinite(value)]
        if odd:
            logger.warning("step %d: not finite, written as null: %s", step, ", ".join(odd))
        record = {"step": step} | {name: None if name in odd else value for name, value in metrics.items()}
        line = memoryview(msgspec.json.encode(record) + b"\n")
        end = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(end)
            raise OSError(error.errno, error.strerror, self._file.name) from error

    def close(self) -> None:
        self._file.close()


def _drop_torn_line(path: Path) -> None:
    """What a crash left after the last newline would make a broken line of the next record."""
    if not path.is_file():
        return
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with path.open("rb+") as file:
            file.truncate(end)
