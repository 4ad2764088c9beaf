"""Runs benchmarks, each in a process of its own, and holds their figures against their bars."""

import argparse
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.machine import describe
from benchmarks.registry import BENCHMARKS, ENGINE_BENCHMARKS
from benchmarks.result import Result

RESULTS = Path(__file__).parent / "results"
MODULES = BENCHMARKS | ENGINE_BENCHMARKS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=sorted(MODULES), metavar="NAME", help=", ".join(MODULES)
    )
    parser.add_argument("--engines", action="store_true", help="run those against real SGLang and vLLM")
    parser.add_argument("--child", help=argparse.SUPPRESS, metavar="FILE")
    arguments = parser.parse_args()
    names = arguments.only or list(ENGINE_BENCHMARKS if arguments.engines else BENCHMARKS)
    if arguments.child:
        results = importlib.import_module(MODULES[names[0]]).run()
        Path(arguments.child).write_bytes(msgspec.json.encode(results))
        return 0
    machine = describe()
    results: list[Result] = []
    failed: list[str] = []
    print(f"{'':66} {'value':>12} {'unit':22} {'bar':>9}")
    for name in names:
        found = _run(name)
        if found is None:
            failed.append(name)
            print(f"{name:66} did not finish")
            continue
        results += found
        for result in found:
            print(_row(result), flush=True)
    if arguments.only is None:
        RESULTS.mkdir(exist_ok=True)
        prefix = "engines-" if arguments.engines else ""
        for file, content in (("latest.json", results), ("machine.json", machine)):
            (RESULTS / f"{prefix}{file}").write_bytes(
                msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
            )
    short = [result.name for result in results if result.holds is False]
    for name in short:
        print(f"falls short: {name}")
    return 1 if short or failed else 0


def _run(name: str) -> list[Result] | None:
    """In a fresh process, so that none inherits another's memory, threads or imports. None: it failed."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "benchmarks", "--only", name, "--child", file.name]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(*done.stderr.splitlines()[-30:], sep="\n", file=sys.stderr)
            return None
        return msgspec.json.decode(Path(file.name).read_bytes(), type=list[Result])


def _row(result: Result) -> str:
    value = "-" if result.value is None else f"{result.value:.4g}"
    marks = {True: "  holds", False: "  FALLS SHORT", None: ""}
    mark = "" if result.bar is None else marks[result.holds]
    return f"{result.name:66} {value:>12} {result.unit:22} {result.bar or '':>9}{mark}"


if __name__ == "__main__":
    sys.exit(main())
