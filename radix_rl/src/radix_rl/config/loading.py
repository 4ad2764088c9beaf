"""Reads a `RunConfig` from a TOML file and `key.path=value` overrides.

Every fault is one ConfigurationError.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from radix_rl.config.run import RunConfig
from radix_rl.config.suggestions import suggest
from radix_rl.config.tree import sections_in
from radix_rl.errors import ConfigurationError

UNSET = "unset"
"""The value of an override that takes a setting away."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of `path` with `overrides` applied in order.

    Raises ConfigurationError naming every bad key.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigurationError(f"cannot read configuration file {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        apply_override(table, override)
    return parse_config(table, source=str(path))


def parse_config(table: Mapping[str, Any], source: str) -> RunConfig:
    """Validate a parsed table. `source` names it in errors."""
    try:
        return RunConfig.model_validate(table)
    except ValidationError as error:
        lines = [_describe(entry) for entry in error.errors()]
        raise ConfigurationError(
            "\n  ".join([f"{source}: {len(lines)} invalid setting(s)", *lines])
        ) from error


def apply_override(table: dict[str, Any], override: str) -> None:
    """Set one `key.path=value` in place. The value is TOML where it parses as such, and text otherwise.

    `key.path=unset` takes away what was set, so that the default holds; the text is `'"unset"'`. Choosing
    another variant (`engine.type=remote`) drops the settings of the variant that was there before.
    """
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigurationError(f"expected an override key.path=value, got {override!r}")
    *parents, name = parts
    for depth, parent in enumerate(parents):
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigurationError(
                f"override {override!r}: {'.'.join(parents[: depth + 1])} is a value, not a table of settings"
            )
    if text.strip() == UNSET:
        table.pop(name, None)
        return
    value = _parse_value(text.strip())
    if name == "type" and table.get("type", value) != value:
        table.clear()
    table[name] = value


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _describe(entry: Any) -> str:
    """One line for one pydantic error: path, what was wrong, what was given, known names."""
    location = entry["loc"]
    section, path = _resolve(location)
    where = ".".join(path) or "configuration"
    if entry["type"] == "extra_forbidden":
        return f"{where}: unknown setting; {suggest(RunConfig, section, path, entry['input'])}"
    if entry["type"] == "missing":
        return f"{where}: required, but not set"
    if entry["type"] == "union_tag_not_found":
        return f"{where}.type: required, but not set; known: {', '.join(_variant_names(path))}"
    if entry["type"] == "union_tag_invalid":
        return f"{where}.type: expected {entry['ctx']['expected_tags']}, got {entry['ctx']['tag']!r}"
    message = entry["msg"].removeprefix("Value error, ")
    if isinstance(entry["input"], dict) or " got " in message:
        return f"{where}: {message}"
    return f"{where}: {message}, got {entry['input']!r}"


def _resolve(location: tuple[int | str, ...]) -> tuple[type[BaseModel] | None, list[str]]:
    """The section that holds the last key of a pydantic location, and the path without the variants' tags."""
    section: type[BaseModel] | None = RunConfig
    choices: list[type[BaseModel]] = []
    path: list[str] = []
    for part in location:
        variant = next((choice for choice in choices if _tag(choice) == part), None)
        if variant is not None:
            section, choices = variant, []
            continue
        path.append(str(part))
        if (
            part == location[-1]
            and len(choices) <= 1
            and section is not None
            and part not in section.model_fields
        ):
            break
        if isinstance(part, int) or section is None:
            continue
        field = section.model_fields.get(part)
        choices = list(sections_in(field.annotation)) if field else []
        if len(choices) == 1:
            section = choices[0]
    return section, path


def _variant_names(path: Sequence[str]) -> list[str]:
    """The types that a section with variants may have."""
    choices: list[type[BaseModel]] = [RunConfig]
    for name in path:
        fields = [choice.model_fields[name] for choice in choices if name in choice.model_fields]
        # A number is a place in a list of sections, whose element type is the list's.
        choices = [section for field in fields for section in sections_in(field.annotation)] or choices
    return [str(_tag(choice)) for choice in choices]


def _tag(section: type[BaseModel]) -> Any:
    field = section.model_fields.get("type")
    return field.default if field else None
