"""Sizes and durations as people write them: "1gb", "64 MiB", "2h"."""

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
