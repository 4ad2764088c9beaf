"""The pages point at what exists: files by links and by name, in the site and on GitHub."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
PACKAGES = ("radix_rl", "radix_engine_plugins", "radix_transfer_plugins")
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
PATH = re.compile(
    r"`((?:radix_rl|radix_engine_plugins|radix_transfer_plugins|docs|benchmarks|tests|examples)/[\w./-]*)`"
)
SHORT_PATH = re.compile(r"`([a-z_]+/[\w/]+(?:\.py|/))`")


def without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def exists(path: str) -> bool:
    """Whether a path exists, from the root of the checkout or of a package's sources."""
    package, _, rest = path.partition("/")
    inside = ROOT / package / "src" / package / rest
    return (ROOT / path).exists() or (package in PACKAGES and inside.exists())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_lead_to_files(page):
    links = LINK.findall(without_blocks(page))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    assert [path for path in PATH.findall(without_blocks(page)) if not exists(path)] == []


def test_a_newcomers_page_answers_at_least_twenty_changes():
    rows = re.findall(
        r"^\| (?!to change|a new|---)(.+?) \| (.+) \|$", without_blocks(ROOT / "docs/which-file.md"), re.M
    )
    assert len(rows) > 20
    assert [change for change, where in rows if not re.search(r"`[\w./-]+`|class", where)] == []


def test_the_architecture_names_files_that_exist():
    text = without_blocks(ROOT / "docs/architecture.md")
    paths = SHORT_PATH.findall(text)
    assert len(paths) > 10
    roots = [ROOT / package / "src" / package for package in PACKAGES]
    missing = [
        path for path in paths if not exists(path) and not any((root / path).exists() for root in roots)
    ]
    assert missing == []


def pages_of(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from pages_of(value)


def test_every_page_is_in_the_navigation_once():
    settings = tomllib.loads((ROOT / "zensical.toml").read_text())
    listed = list(pages_of(settings["project"]["nav"]))
    assert sorted(listed) == sorted(
        str(page.relative_to(ROOT / "docs")) for page in PAGES if (ROOT / "docs") in page.parents
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_list_or_table_begins_after_an_empty_line(page):
    # GitHub shows it either way; the site would show one paragraph.
    glued = re.findall(r"^(?![-|#\s]|\d+\. )\S.*\n(?=- |1\. |\|)", without_blocks(page), re.MULTILINE)
    assert glued == []
