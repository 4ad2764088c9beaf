"""Every metric that is logged has a row in the guide to training, and every row names one that is logged."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "radix_rl/src/radix_rl"
NAME = re.compile(r"(?:rollout|train|mismatch|replay|eval|store|weights|time)/[a-z0-9_*]*[a-z0-9*]")


def names_in(tree: ast.AST) -> Iterator[str]:
    """Metric names in a module; `*` stands for what an f-string fills in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "*" for part in node.values]
            yield "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_timed":
            phase = node.args[1]
            assert isinstance(phase, ast.Constant)
            yield f"time/{phase.value}_s"


def logged() -> set[str]:
    paths = [path for room in ("rollout", "train", "weights") for path in (SOURCES / room).rglob("*.py")]
    found = {name for path in paths for name in names_in(ast.parse(path.read_text())) if NAME.fullmatch(name)}
    # A seed or a request's name, not a metric.
    return found - {"eval/*"}


def documented() -> set[str]:
    section = (ROOT / "docs/training.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in NAME.findall(row)}


def is_filled_in(name: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[a-z0-9_]+"), name) is not None


def test_every_metric_that_is_logged_is_documented():
    rows = documented()
    assert len(logged()) > 40
    assert [name for name in sorted(logged()) if not any(is_filled_in(row, name) for row in rows)] == []


def test_every_metric_that_is_documented_is_logged():
    names = logged()
    assert [row for row in sorted(documented()) if not any(is_filled_in(row, name) for name in names)] == []
