"""Every setting with values that mean nothing: refused by its path, or taken; nothing else is raised."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from radix_rl.config import RunConfig, parse_config
from radix_rl.config.other_names import OTHER_NAMES
from radix_rl.config.tree import sections_in, settings_below
from radix_rl.errors import ConfigurationError
from radix_rl.launch.checks import check_launch

NONSENSE = (
    *(-1, 0, 10**30, -(10**30), 0.5, 1e308, float("inf"), float("-inf"), float("nan"), True),
    *("", " ", "nonsense", "\0", "~nobody/x", "\n", "é" * 300, [], {}, [[]], ["\0"], [-1], {"x": {}}),
)


def settings(
    section: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """The path of every value, with the table of its section's variant."""
    for name, field in section.model_fields.items():
        children = list(sections_in(field.annotation))
        is_list = "tuple" in str(field.annotation)
        if name == "type" or (children and is_list):
            continue
        if not children:
            kind = section.model_fields.get("type")
            yield (*path, name), {} if kind is None else {"type": kind.default}
        for child in children:
            yield from settings(child, (*path, name))


ALL = list(settings(RunConfig))


def table(model: Path, output_dir: Path) -> dict[str, Any]:
    return {
        "output_dir": str(output_dir),
        "model": {"path": str(model)},
        "environment": {"type": "arithmetic"},
        "train": {"steps": 1},
    }


def test_the_whole_tree_is_tried():
    assert len(ALL) > 90


@pytest.mark.parametrize(("path", "variant"), ALL, ids=[f"{'.'.join(p)}-{v.get('type')}" for p, v in ALL])
def test_nonsense_is_refused_by_its_path_or_taken(tmp_path, path, variant):
    (tmp_path / "config.json").write_text("{}")
    for value in NONSENSE:
        tree = table(tmp_path, tmp_path / "run")
        section = tree
        for name in path[:-1]:
            section = section.setdefault(name, {})
        if variant and section.get("type", variant["type"]) != variant["type"]:
            section.clear()
        section.update(variant)
        section[path[-1]] = value
        try:
            config = parse_config(tree, source="test")
            check_launch(config)
        except ConfigurationError as error:
            complaint = str(error)
        else:
            continue
        assert path[0] in complaint, value


@pytest.mark.parametrize("number", [10**30, float("inf"), float("nan")])
def test_no_setting_takes_a_number_that_no_machine_holds(tmp_path, number):
    for path, variant in ALL:
        tree = table(tmp_path, tmp_path / "run")
        section = tree
        for name in path[:-1]:
            section = section.setdefault(name, {})
        section.update(variant)
        section[path[-1]] = number
        try:
            config = parse_config(tree, source="test")
        except ConfigurationError:
            continue
        value: Any = config
        for name in path:
            value = getattr(value, name)
        assert isinstance(value, str | Path) or value == float(10**30), path


def test_other_tools_names_mean_settings_that_exist():
    known = {path for path, _ in settings_below(RunConfig)}
    assert {ours for ours in OTHER_NAMES.values() if ours not in known} == set()
