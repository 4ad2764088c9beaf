"""Sizes and durations as people write and read them: "1gb", "64 MiB", "2h"."""

import re

from radix_transfer_plugins.errors import ConfigError

BYTES_PER_UNIT = {
    unit: 1024**power
    for power, units in enumerate(
        (("", "b"), ("k", "kb", "kib"), ("m", "mb", "mib"), ("g", "gb", "gib"), ("t", "tb", "tib"))
    )
    for unit in units
}
SECONDS_PER_UNIT = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z]*)\s*", re.ASCII)


def parse_bytes(value: object, name: str = "size") -> int:
    """A size in bytes from an int or from text with a unit.

    Kb, mb, gb and tb count by 1024. Raises ConfigError.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value >= 0:
            return value
    elif isinstance(value, str) and (match := _NUMBER_AND_UNIT.fullmatch(value.lower())):
        number, unit = match.groups()
        if unit in BYTES_PER_UNIT:
            return (
                int(float(number) * BYTES_PER_UNIT[unit])
                if "." in number
                else int(number) * BYTES_PER_UNIT[unit]
            )
    raise ConfigError(
        f'{name}: expected bytes as an integer >= 0 or text such as "512mb" or "1gb", got {value!r}'
    )


def parse_seconds(value: object, name: str = "duration") -> float:
    """A duration in seconds from a number or from text such as "90s", "2h" or "1d". Raises ConfigError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if 0 <= value < float("inf"):
            return float(value)
    elif isinstance(value, str) and (match := _NUMBER_AND_UNIT.fullmatch(value.lower())):
        number, unit = match.groups()
        if unit in SECONDS_PER_UNIT:
            return float(number) * SECONDS_PER_UNIT[unit]
    raise ConfigError(
        f'{name}: expected seconds as a number >= 0 or text such as "90s", "30m" or "2h", got {value!r}'
    )


def format_bytes(num_bytes: int) -> str:
    """A size for people, such as "1.2 MB"; units count by 1024, as in `parse_bytes`."""
    size = float(num_bytes)
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1024:
            return f"{num_bytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TB"


def format_seconds(duration_s: float) -> str:
    """A duration for people in its two largest units, such as "45s", "12m 05s", "3h 12m" or "2d 04h"."""
    seconds = max(0, int(duration_s))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02}s"
    if seconds < 86400:
        return f"{seconds // 3600}h {seconds // 60 % 60:02}m"
    return f"{seconds // 86400}d {seconds // 3600 % 24:02}h"
