"""What a benchmark returns."""

import msgspec


class Result(msgspec.Struct, frozen=True):
    name: str
    value: float | None
    """None: it was not measured; the name says why."""
    unit: str
    bar: str | None
    """What the value must satisfy, such as ">= 15"; None: shown only."""
    holds: bool | None
    """None: not measured."""


def at_least(name: str, value: float, unit: str, bar: float) -> Result:
    return Result(name, value, unit, f">= {bar:g}", value >= bar)


def at_most(name: str, value: float, unit: str, bar: float) -> Result:
    return Result(name, value, unit, f"<= {bar:g}", value <= bar)


def shown(name: str, value: float, unit: str) -> Result:
    """A figure without a bar."""
    return Result(name, value, unit, None, True)


def not_measured(name: str, why: str, unit: str, bar: str | None = None) -> Result:
    """A figure whose other side is not on this machine."""
    return Result(f"{name}: not measured, {why}", None, unit, bar, None)
