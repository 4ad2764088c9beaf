"""`metrics.jsonl`: one JSON object a step."""

from pathlib import Path
from typing import Any

import msgspec

from radix_rl.errors import DataError

FILE_NAME = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records in step order.

    A step that was repeated after a resume counts as it went the last time; a last line that a crash tore is
    left out. Raises DataError naming the line of anything else that is broken.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read metrics {str(path)!r}: {error.strerror}") from error
    records: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = msgspec.json.decode(line, type=dict[str, Any])
            records[int(record["step"])] = record
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}, line {number}: not a record of metrics: {error}") from error
    return [records[step] for step in sorted(records)]
