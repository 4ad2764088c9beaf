"""A newcomer who opens a package finds what lives in it: its docstring has a line for each file."""

import ast
import re
from pathlib import Path

import pytest

import radix_engine_plugins
import radix_rl
import radix_transfer_plugins

ROOTS = [Path(package.__path__[0]) for package in (radix_transfer_plugins, radix_engine_plugins, radix_rl)]
PACKAGES = [init.parent for root in ROOTS for init in sorted(root.rglob("__init__.py"))]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path).split("/src/")[-1])
def test_the_legend_has_one_line_for_each_file_and_no_other(package):
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    legend = re.findall(r"^([a-z0-9_]+(?:\.py|/)) +\S", docstring, re.MULTILINE)
    files = [path.name for path in package.glob("*.py") if path.name != "__init__.py"]
    folders = [f"{path.parent.name}/" for path in package.glob("*/__init__.py")]
    assert sorted(legend) == sorted(files + folders)
