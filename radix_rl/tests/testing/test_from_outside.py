"""`radix_rl.testing` used by others: their test file, their missing pytest, the programs of the docs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import radix_rl

GUIDE = Path(__file__).parents[3] / "docs" / "testing.md"


def _run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=200, check=False
    )


def _programs() -> list[str]:
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def test_the_guide_s_test_file_passes_in_a_project_without_settings(tmp_path):
    (tmp_path / "test_my_engine.py").write_text(_programs()[0])

    result = _run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_engine.py", cwd=tmp_path)

    assert result.returncode == 0, result.stdout
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None
    assert int(passed[1]) >= 20


def test_an_engine_that_breaks_its_contract_fails_the_suite(tmp_path):
    broken = _programs()[0].replace(
        "class TestMyEngine",
        "class Deaf(ScriptedEngine):\n    async def abort(self, request_id=None, message=None): ...\n\n\n"
        "class TestMyEngine",
    )
    (tmp_path / "test_my_engine.py").write_text(broken.replace("return ScriptedEngine(", "return Deaf("))

    result = _run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_engine.py", "-k", "an_abort_answers",
        cwd=tmp_path,
    )  # fmt: skip

    assert result.returncode == 1
    assert "1 failed" in result.stdout


def test_the_guide_s_script_prints_what_it_says(tmp_path):
    expected = re.findall(r"```text\n(.*?)```", GUIDE.read_text(), re.DOTALL)

    result = _run("-c", _programs()[1], cwd=tmp_path)

    assert [result.stdout] == expected, result.stderr


def test_without_pytest_the_error_says_what_to_install(tmp_path):
    program = "import sys; sys.modules['pytest'] = None; import radix_rl.testing"

    result = _run("-c", program, cwd=tmp_path)

    assert "radix_rl.testing needs pytest, which is not installed: pip install pytest" in result.stderr


def test_nothing_else_of_the_package_imports_pytest():
    root = Path(radix_rl.__path__[0])
    importers = {
        file.relative_to(root).parts[0]
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import) and any(a.name.startswith("pytest") for a in node.names)
    }

    assert importers == {"testing"}
