"""What the benchmarks ran on."""

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

_PACKAGES = (
    "numpy",
    "msgspec",
    "torch",
    "transformers",
    "ray",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
)


def describe() -> dict[str, object]:
    """Plain JSON types."""
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cpu = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) << 10 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": memory[0] if memory else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": versions,
        "commit": commit,
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_1min": os.getloadavg()[0],
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
