"""Imports of the three packages go one way: between packages, between the rooms of radix_rl, between files.

Every import of our own modules counts: those in functions too, which only put a circle off, and those under
TYPE_CHECKING, because a file cannot be read without what its annotations name. An import of a name that a
package's `__init__` re-exports is an import of that `__init__`. That Python runs the `__init__` of every
folder above a module does not count: else no package could re-export what it holds.

Circles are looked for among the entries of each folder, files and subfolders alike, so that neither two files
nor two folders need each other. A file may use a subfolder beside it that does not use it back.
"""

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

import radix_engine_plugins
import radix_rl
import radix_transfer_plugins

PACKAGES = [["radix_transfer_plugins"], ["radix_engine_plugins"], ["radix_rl"]]

ROOMS = [
    ["errors"],
    [
        "addresses",
        "buckets",
        "concurrency",
        "model_layers",
        "openmp_pool",
        "routers",
        "stop_strings",
        "types",
    ],
    ["config"],
    ["engines"],
    ["launch", "observe", "rollout", "weights"],
    ["server", "train"],
    ["cli"],
    ["testing"],
]
"""Files and folders of radix_rl by floor, the lowest first.

A room may use those of lower floors; what it uses of its own floor must not lead back to it.
"""

Edges = dict[str, set[str]]
"""Dotted name of a module -> those that it imports, itself excepted. A package is its `__init__`."""


def import_edges(*folders: Path) -> Edges:
    """Read every module of these packages."""
    files: dict[str, Path] = {}
    for folder in folders:
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder.parent).with_suffix("").parts
            files[".".join(parts)] = file
    return {
        name: {target for path in _imported(file) if (target := _module(path, files)) not in (None, name)}
        for name, file in files.items()
    }


def _imported(file: Path) -> set[str]:
    paths: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            paths.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            paths.update(f"{node.module}.{alias.name}" for alias in node.names)
    return paths


def _module(path: str, files: dict[str, Path]) -> str | None:
    """The module of ours that an import of `path` reads: itself, or the one that has the name."""
    for name in (path, path.rpartition(".")[0]):
        for module in (f"{name}.__init__", name):
            if module in files:
                return module
    return None


def circles(edges: Edges) -> list[str]:
    """One circle of every folder that has any, as `a -> b -> a (an import of each step)`."""
    inside: defaultdict[str, dict[str, dict[str, tuple[str, str]]]] = defaultdict(lambda: defaultdict(dict))
    for source, targets in edges.items():
        for target in targets:
            folder, one, other = _part(source, target)
            inside[folder][one].setdefault(other, (source, target))
    found = []
    for folder, links in sorted(inside.items()):
        try:
            TopologicalSorter({one: sorted(others) for one, others in links.items()}).prepare()
        except CycleError as error:
            ring = error.args[1][::-1]
            steps = [" imports ".join(links[a][b]) for a, b in pairwise(ring)]
            found.append(f"in {folder or 'the packages'}: {' -> '.join(ring)} ({'; '.join(steps)})")
    return found


def _part(source: str, target: str) -> tuple[str, str, str]:
    """The folder where the paths of two modules part, and the entry of it that each is in."""
    one, other = source.split("."), target.split(".")
    depth = next(i for i in range(len(one)) if one[i] != other[i])
    return ".".join(one[:depth]), one[depth], other[depth]


def upward(edges: Edges, folder: str, floors: list[list[str]]) -> list[str]:
    """Imports from an entry of `folder` ("" for the packages themselves) to one of a higher floor.

    Raises LookupError for an entry without a floor.
    """
    floor = {name: number for number, names in enumerate(floors) for name in names}
    found = []
    for source, targets in edges.items():
        for target in targets:
            parted, one, other = _part(source, target)
            if parted != folder:
                continue
            for name in (one, other):
                if name not in floor:
                    raise LookupError(f"{name} of {folder or 'the packages'} has no floor; give it one")
            if floor[one] < floor[other]:
                found.append(f"{source} imports {target}")
    return sorted(found)


@pytest.fixture(scope="module")
def edges() -> Edges:
    packages = (radix_transfer_plugins, radix_engine_plugins, radix_rl)
    return import_edges(*(Path(package.__path__[0]) for package in packages))


def test_no_package_imports_one_above_it(edges):
    assert upward(edges, "", PACKAGES) == []


def test_no_room_imports_one_of_a_higher_floor(edges):
    assert upward(edges, "radix_rl", ROOMS) == []


def test_no_files_and_no_folders_import_in_a_circle(edges):
    assert circles(edges) == []


# The checker itself, on small trees


def _tree(root: Path, **files: str) -> Edges:
    """Import edges of a package `house`; a file's name has `__` for a slash."""
    for name, text in files.items():
        file = root / "house" / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "house" / "__init__.py").write_text("")
    return import_edges(root / "house")


def test_a_circle_of_two_files_is_named_with_its_imports(tmp_path):
    edges = _tree(tmp_path, a="import house.b", b="def f():\n    from house.a import x")

    (circle,) = circles(edges)

    assert circle.startswith("in house: ")
    assert "house.a imports house.b" in circle
    assert "house.b imports house.a" in circle


def test_folders_that_need_each_other_are_a_circle_though_no_files_are(tmp_path):
    edges = _tree(
        tmp_path,
        roof__tiles="import house.cellar.wine",
        cellar__stairs="from house.roof import beams",
        cellar__wine="",
        roof__beams="",
    )

    (circle,) = circles(edges)

    assert "house.roof.tiles imports house.cellar.wine" in circle
    assert "house.cellar.stairs imports house.roof.beams" in circle


def test_circles_of_deeper_folders_are_found_too(tmp_path):
    edges = _tree(tmp_path, roof__a="import house.roof.b", roof__b="import house.roof.a")

    assert [circle.partition(":")[0] for circle in circles(edges)] == ["in house.roof"]


def test_a_file_may_use_the_folder_beside_it(tmp_path):
    edges = _tree(tmp_path, door="import house.cellar.wine", cellar__wine="")

    assert circles(edges) == []


def test_imports_for_type_checkers_count(tmp_path):
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.b"
    edges = _tree(tmp_path, a=guarded, b="import house.a")

    assert len(circles(edges)) == 1


def test_an_arrow_upward_is_named(tmp_path):
    edges = _tree(tmp_path, cellar__wine="from house.roof.tiles import Tile", roof__tiles="")

    assert upward(edges, "house", [["cellar"], ["roof"]]) == ["house.cellar.wine imports house.roof.tiles"]
    assert upward(edges, "house", [["roof"], ["cellar"]]) == []


def test_a_room_without_a_floor_is_refused(tmp_path):
    edges = _tree(tmp_path, cellar__wine="import house.roof.tiles", roof__tiles="")

    with pytest.raises(LookupError, match="roof of house has no floor"):
        upward(edges, "house", [["cellar"]])
