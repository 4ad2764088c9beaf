"""Writes a `RunConfig` as the TOML that `load_config` reads as the same configuration."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from radix_rl.config.run import RunConfig

FILE_NAME = "config.toml"
"""What a run's configuration is called in its output directory."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(config: RunConfig) -> str:
    """Every setting with its value, defaults too. What is unset is left out: its default is unset."""
    values = config.model_dump(mode="json", exclude_none=True)
    return "\n".join(_table("", values)).strip() + "\n"


def _table(path: str, values: Mapping[str, Any]) -> Iterator[str]:
    tables = {name: value for name, value in values.items() if isinstance(value, dict) and value}
    for name, value in values.items():
        if name not in tables:
            yield f"{_key(name)} = {_value(value)}"
    for name, table in tables.items():
        here = f"{path}.{_key(name)}" if path else _key(name)
        yield from ("", f"[{here}]", *_table(here, table))


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return _text(value) if isinstance(value, str) else repr(value)


def _text(value: str) -> str:
    """A basic string. JSON escapes as TOML does, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
