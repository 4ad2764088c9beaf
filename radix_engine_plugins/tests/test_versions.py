"""A version that is not in a plugin's table runs only if all that the plugin hooks looks as it was tested."""

import logging
from pathlib import Path

import pytest

import radix_engine_plugins
from radix_engine_plugins.sglang.plugin import SUPPORTED_SGLANG
from radix_engine_plugins.versions import UnknownVersionError, check_version, read_shapes, shape_of
from radix_engine_plugins.vllm.plugin import SUPPORTED_VLLM

SHAPES = {
    "core.engine.Engine.step": ["(self, prompt, *args, priority, **kwargs)"],
    "core.outputs.Output": ["{index, text}", "{index, text, rows}"],
}
ENGINE = """
class Engine:
    async def step(self, prompt: "str", *args: int, priority: int = 0, **kwargs: object) -> None:
        pass
"""
OUTPUT = "class Output:\n    index: int\n    text: str = ''\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "core").mkdir()
    (tmp_path / "core/engine.py").write_text(ENGINE)
    (tmp_path / "core/outputs.py").write_text(OUTPUT)
    return tmp_path


def test_shapes_are_read_from_sources_without_annotations_and_defaults(package: Path) -> None:
    assert shape_of(package, "core.engine.Engine.step") == "(self, prompt, *args, priority, **kwargs)"
    assert shape_of(package, "core.outputs.Output") == "{index, text}"
    for absent in ("core.engine.Engine.run", "core.engines.Engine.step", "other.Engine", "core"):
        assert shape_of(package, absent) is None


def test_a_version_of_the_table_runs_without_a_look(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_version("Engine", "1.0+cu130", ["1.0", "1.1"], tmp_path, SHAPES)
    assert caplog.text == ""


def test_another_version_with_the_same_shapes_runs_with_a_warning_that_names_it(
    package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_version("Engine", "1.2", ["1.0", "1.1"], package, SHAPES)
    assert "was not tried with Engine 1.2, only with 1.0, 1.1" in caplog.text


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("engine", ENGINE.replace("prompt", "prompts"), r"Engine\.step is \(self, prompts.*\(self, prompt,"),
        ("engine", ENGINE.replace("def step", "def go"), r"Engine\.step is not there, tested: \(self"),
        ("outputs", OUTPUT + "    more: int = 1\n", r"Output is \{index, text, more\}, .* or \{index"),
    ],
)
def test_another_version_in_which_a_seam_changed_is_refused_by_the_seams_name(
    package: Path, file: str, text: str, named: str
) -> None:
    (package / f"core/{file}.py").write_text(text)
    with pytest.raises(UnknownVersionError, match=f"supports Engine 1.0, got '1.2'.*{named}"):
        check_version("Engine", "1.2", ["1.0"], package, SHAPES)


@pytest.mark.parametrize(("plugin", "table"), [("sglang", SUPPORTED_SGLANG), ("vllm", SUPPORTED_VLLM)])
def test_the_shapes_of_both_plugins_can_be_read_and_their_versions_are_documented(
    plugin: str, table: tuple[str, ...]
) -> None:
    folder = Path(radix_engine_plugins.__file__).parent / plugin
    shapes = read_shapes(folder)
    assert len(shapes) > 15
    assert all(shape[0] in "({" for known in shapes.values() for shape in known)
    guide = (folder.parents[3] / f"docs/{plugin}.md").read_text()
    assert [version for version in table if f"| {version} " not in guide] == []
