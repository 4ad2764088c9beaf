"""`metrics.jsonl`: every step is on disk before the next one begins."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from radix_rl.observe.trackers.base import Tracker

logger = logging.getLogger(__name__)


class JsonLinesTracker(Tracker):
    """Appends, so that a resumed run goes on in the same file. Values that are not finite become null: JSON
    has no NaN."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._file = path.open("ab")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        odd = [name for name, value in metrics.items() if not math.isfinite(value)]
        if odd:
            logger.warning("step %d: not finite, written as null: %s", step, ", ".join(odd))
        record = {"step": step} | {name: None if name in odd else value for name, value in metrics.items()}
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

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
