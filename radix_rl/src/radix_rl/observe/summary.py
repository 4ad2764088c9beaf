"""`summary.json`: the figures of a finished run."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

FILE_NAME = "summary.json"


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Plain JSON types only. Readers see the old file or the whole new one."""
    path = run_dir / FILE_NAME
    part = path.with_suffix(".json.part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    os.replace(part, path)
    return path


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Empty while a run has none."""
    path = run_dir / FILE_NAME
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}
