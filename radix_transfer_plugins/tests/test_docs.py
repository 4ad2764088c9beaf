"""Every code block of the store's guides runs as written, and the references they show are valid."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import uuid

import pytest

import radix_transfer_plugins
from radix_transfer_plugins import StoreRef, registry

PACKAGE = pathlib.Path(__file__).parents[1]
DOCS = PACKAGE.parent / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path, language):
    found = [text for name, text in BLOCK.findall(path.read_text()) if name == language]
    assert found, f"{path} has no {language} blocks"
    return found


@pytest.fixture(autouse=True)
def forget_what_a_guide_registers(monkeypatch, tmp_path):
    for one in (registry._backends, registry._codecs):
        monkeypatch.setattr(one, "_classes", dict(one._classes))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", [DOCS / "store.md", PACKAGE / "README.md"], ids=lambda path: path.name)
def test_the_python_of_a_guide_runs_from_top_to_bottom_and_leaves_nothing(path):
    namespace = {"__name__": "guide"}
    for text in blocks(path, "python"):
        exec(compile(text, str(path), "exec"), namespace)
    left = radix_transfer_plugins.create_backend("memory")
    assert [info.key for info in left.list("")] == []
    left.close()


def test_the_ten_lines_are_ten():
    engine, trainer = blocks(DOCS / "store.md", "python")[:2]
    for text in (engine, trainer):
        assert len([line for line in text.splitlines() if line.strip()]) <= 10


def test_the_shell_commands_of_the_guide_run():
    space = f"guide-{uuid.uuid4().hex}"
    script = "\n".join(blocks(DOCS / "store.md", "bash")).replace('"guide"', f'"{space}"')
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    radix_transfer_plugins.create_backend("shared_memory", {"space": space}).close()
    try:
        subprocess.run(["bash", "-euc", script], check=True, timeout=120, env={**os.environ, "PATH": path})
    finally:
        shutil.rmtree(f"/dev/shm/radix-{space}", ignore_errors=True)


def test_the_references_of_the_wire_format_parse():
    for text in blocks(DOCS / "wire-format.md", "json"):
        data = json.loads(text)
        assert StoreRef.from_builtins(data).to_builtins() == data


def test_the_backend_and_the_codec_of_the_extension_guide_pass_their_suites(tmp_path):
    module = tmp_path / "test_guide.py"
    module.write_text("\n\n".join(blocks(DOCS / "extending-the-store.md", "python")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(module)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) >= 30
    assert "skipped" not in done.stdout
