"""Which versions of an engine a plugin runs in: those that were tried, and those whose seams look the same.

A seam is a function of the engine that the plugin wraps or relies on, or a class whose fields it reads. Its
shape is its parameters or fields: names, order and kinds. `shapes.json` beside each plugin has the shapes of
the versions in its table. They are read from the engine's sources: importing its modules early would change
what is to be hooked.
"""

import ast
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

Shapes = Mapping[str, Sequence[str]]
"""Dotted path of a seam below the engine's package -> its shapes in the versions of the table."""


class UnknownVersionError(RuntimeError):
    """A version of an engine in which what a plugin hooks has changed."""


def read_shapes(plugin: Path) -> Shapes:
    """The table of a plugin, from its folder."""
    return msgspec.json.decode((plugin / "shapes.json").read_bytes(), type=dict[str, list[str]])


def check_version(engine: str, version: str, table: Sequence[str], package: Path, shapes: Shapes) -> None:
    """Refuse a version that is not in the table, unless every seam has a shape that was tested.

    `package`: the folder of the engine's package. Logs a warning that names the version if all have. Raises
    UnknownVersionError that names the seams which have not.
    """
    # A local part such as `+cu130` names a build of the same sources.
    if version.partition("+")[0] in table:
        return
    changed = [
        f"{seam} is {found or 'not there'}, tested: {' or '.join(known)}"
        for seam, known in shapes.items()
        if (found := shape_of(package, seam)) not in known
    ]
    if changed:
        raise UnknownVersionError(
            f"radix-engine-plugins supports {engine} {', '.join(table)}, got {version!r}, where what it "
            f"hooks has changed, so that the output store stays off: {'; '.join(changed)}. Install a "
            f"supported {engine}, or see docs/{engine.lower()}.md on moving to a new one"
        )
    logger.warning(
        "radix-engine-plugins was not tried with %s %s, only with %s. All that it hooks has the same shape "
        "there, so the output store can be used; compare some stored outputs with inline ones first",
        engine,
        version,
        ", ".join(table),
    )


def shape_of(package: Path, seam: str) -> str | None:
    """`(self, prompt, *, priority)` for a function, `{index, text}` for a class; None: it is not there."""
    folder, names = package, seam.split(".")
    while names and (folder / names[0]).is_dir():
        folder /= names.pop(0)
    if not names or not (file := folder / f"{names[0]}.py").is_file():
        return None
    node: ast.AST | None = ast.parse(file.read_text())
    for name in names[1:]:
        members = getattr(node, "body", [])
        node = next((member for member in members if getattr(member, "name", None) == name), None)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _parameters(node.args)
    if isinstance(node, ast.ClassDef):
        fields = [member.target for member in node.body if isinstance(member, ast.AnnAssign)]
        return f"{{{', '.join(ast.unparse(field) for field in fields)}}}"
    return None


def _parameters(arguments: ast.arguments) -> str:
    """Without annotations and defaults."""
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments.defaults = []
    arguments.kw_defaults = [None for _ in arguments.kw_defaults]
    return f"({ast.unparse(arguments)})"
