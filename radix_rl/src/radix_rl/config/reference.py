"""`reference`: the configuration tree as a page of documentation.

docs/configuration.md holds it, and a test compares.
"""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from radix_rl.config.base import parse_bytes
from radix_rl.config.run import RunConfig
from radix_rl.config.tree import sections_in


def reference() -> str:
    """Markdown: a table of settings for each section, in the order of the tree."""
    return "\n".join(_section("", RunConfig)).strip() + "\n"


def _section(path: str, section: type[BaseModel]) -> Iterator[str]:
    kind = section.model_fields.get("type")
    title = f"[{path}]" if path else "Top level"
    suffix = f' with `type = "{kind.default}"`' if kind is not None else ""
    yield f"### `{title}`{suffix}" if path else f"### {title}"
    yield ""
    yield _one_line(section.__doc__)
    yield ""
    nested: list[tuple[str, type[BaseModel]]] = []
    rows: list[str] = []
    for name, field in section.model_fields.items():
        inner = list(sections_in(field.annotation))
        nested += [(f"{path}.{name}" if path else name, child) for child in inner]
        if not inner and name != "type":
            rows.append(
                f"| `{name}` | {_type_name(field)} | {_default(field)} | {_one_line(field.description)} |"
            )
    if rows:
        yield from ("| setting | values | default | |", "|---|---|---|---|", *rows, "")
    for child_path, child in nested:
        yield from _section(child_path, child)


def _type_name(field: FieldInfo) -> str:
    if any(getattr(item, "func", None) is parse_bytes for item in field.metadata):
        return "size"
    values = _values(field.annotation)
    bounds = [
        _BOUNDS[type(bound).__name__](bound)
        for bound in field.metadata
        if type(bound).__name__ in _BOUNDS and getattr(bound, "le", 0) < _LARGEST_INT32
    ]
    return ", ".join([" or ".join(values), *bounds])


_LARGEST_INT32 = (1 << 31) - 1
"""Bounds that follow from a type's width tell a reader nothing."""


_BOUNDS = {
    "Ge": lambda bound: f"≥ {bound.ge}",
    "Gt": lambda bound: f"> {bound.gt}",
    "Le": lambda bound: f"≤ {bound.le}",
    "Lt": lambda bound: f"< {bound.lt}",
}


def _values(annotation: Any) -> list[str]:
    if hasattr(annotation, "__metadata__"):
        return _values(annotation.__origin__)
    arguments = get_args(annotation)
    origin = str(getattr(annotation, "__origin__", annotation))
    if "Literal" in origin:
        return [f'`"{value}"`' for value in arguments]
    if annotation is type(None):
        return []
    if (
        arguments
        and ("Union" in origin or "|" in str(annotation))
        and "tuple" not in origin
        and "dict" not in origin
    ):
        return [value for argument in arguments for value in _values(argument)]
    if "tuple" in origin:
        items = [argument for argument in arguments if argument is not Ellipsis]
        return [f"list of {_values(items[0])[0]}"]
    if "dict" in origin:
        return ["table"]
    return [
        {"str": "text", "int": "integer", "float": "number", "bool": "true, false", "Path": "path"}[
            annotation.__name__
        ]
    ]


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "empty"
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "unset"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    if isinstance(field.default, str):
        return f'`"{field.default}"`'
    if isinstance(field.default, tuple):
        return f"`{list(field.default)}`" if field.default else "empty"
    return f"`{field.default}`"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
