"""The Python of the repository's README runs as written and leaves nothing in the store."""

import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


@pytest.fixture
def space():
    """A shared-memory space of this test's own, in place of the README's."""
    name = f"readme-{uuid.uuid4().hex}"
    yield name
    shutil.rmtree(f"/dev/shm/radix-{name}", ignore_errors=True)


def test_the_python_runs_from_top_to_bottom_and_leaves_nothing(space):
    found = BLOCK.findall(README.read_text())
    assert found
    namespace: dict[str, Any] = {"__name__": "readme"}
    for text in found:
        assert '{"space": "readme"}' in text
        exec(compile(text.replace('"readme"', f'"{space}"'), str(README), "exec"), namespace)
    store = namespace["store"]
    assert list(store.list_objects()) == []
    store.close()


def test_every_link_to_a_file_has_one():
    links = LINK.findall(README.read_text())
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
