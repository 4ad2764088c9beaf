"""The configuration tree as data: which settings there are and where."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a field may hold: one, the variants of a union, or the elements of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_in(argument)


def settings_below(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field of `section` and of the sections in it, with its dotted path.

    A section comes before its fields, a field of several variants once for each.
    """
    for name, field in section.model_fields.items():
        here = f"{path}.{name}" if path else name
        yield here, field
        for child in sections_in(field.annotation):
            yield from settings_below(child, here)
