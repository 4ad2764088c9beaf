"""Every package of engines and server says in its docstring what each of its files is for."""

import importlib
import pkgutil
import re

import pytest

import radix_rl.engines
import radix_rl.server

_PACKAGES = [
    name
    for root in (radix_rl.engines, radix_rl.server)
    for name in (
        root.__name__,
        *(m.name for m in pkgutil.walk_packages(root.__path__, root.__name__ + ".") if m.ispkg),
    )
]


@pytest.mark.parametrize("name", _PACKAGES)
def test_the_legend_has_one_line_for_each_file_and_no_other(name):
    package = importlib.import_module(name)
    legend = re.findall(r"^([a-z0-9_]+(?:\.py|/)) +\S", package.__doc__ or "", re.MULTILINE)
    files = [f"{m.name}{'/' if m.ispkg else '.py'}" for m in pkgutil.iter_modules(package.__path__)]
    assert sorted(legend) == sorted(files)
