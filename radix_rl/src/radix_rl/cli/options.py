"""Options of a command made from the fields of a section of the configuration."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from radix_rl.config.base import Section
from radix_rl.errors import ConfigurationError

T = TypeVar("T", bound=Section)


def options_of(
    section: type[Section], *, panel: str, aliases: Mapping[str, Sequence[str]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of `section`; it gets them as one mapping `settings`.

    `aliases` are further spellings: field -> flags. A field's docstring is its help. Values are checked by
    the section, not by the command line.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.name != "settings"]
        fields = {name: field for name, field in section.model_fields.items() if name != "type"}
        added = [_option(name, field, panel, aliases.get(name, ())) for name, field in fields.items()]

        @functools.wraps(command)
        def with_settings(**values: Any) -> None:
            settings = {name: values.pop(name) for name in fields}
            command(settings=settings, **values)

        parameters = [*own, *added]
        vars(with_settings)["__signature__"] = signature.replace(parameters=parameters)
        with_settings.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_settings

    return decorate


def checked(section: type[T], values: Mapping[str, Any], flags: Mapping[str, str]) -> T:
    """The section that these options make.

    Raises ConfigurationError naming every wrong one's flag; `flags` are those that are not named as their
    field is.
    """
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigurationError("; ".join(_complaint(entry, flags) for entry in error.errors())) from error


def _complaint(entry: Any, flags: Mapping[str, str]) -> str:
    name = str(entry["loc"][0]) if entry["loc"] else ""
    flag = flags.get(name, f"--{name.replace('_', '-')}")
    message = entry["msg"].removeprefix("Value error, ")
    return f"{flag}: {message}" if " got " in message else f"{flag}: {message}, got {entry['input']!r}"


def _option(name: str, field: FieldInfo, panel: str, aliases: Sequence[str]) -> inspect.Parameter:
    kinds = _kinds(field.annotation)
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        *aliases,
        help=" ".join((field.description or "").split()),
        metavar=_choices(kinds),
        rich_help_panel=panel,
    )
    parsed: Any = next((kind for kind in (bool, int, float) if kind in kinds), str)
    annotation = Annotated[parsed | None if NoneType in kinds else parsed, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation
    )


def _kinds(annotation: Any) -> list[Any]:
    """The types that a union is made of, without what is annotated."""
    if get_origin(annotation) is Literal:
        return [annotation]
    if hasattr(annotation, "__metadata__"):
        return _kinds(annotation.__origin__)
    return [kind for argument in get_args(annotation) for kind in _kinds(argument)] or [annotation]


def _choices(kinds: Sequence[Any]) -> str | None:
    """The values of a setting that takes only some, as help shows them."""
    literals = [get_args(kind) for kind in kinds if get_origin(kind) is Literal]
    return "|".join(literals[0]) if literals else None
