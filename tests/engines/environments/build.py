"""Builds or reuses the environment of one engine: `python build.py sglang_cpu` prints its folder.

An environment is described by a folder beside this file:
    environment.toml   target folder (below the repository), index-wide constraints
    requirements.txt   installed with their dependencies
    no-deps.txt        installed alone, since their dependencies need a GPU
    site/              files copied into site-packages, if there are any
    package/           a package of ours, installed
The project's own packages are installed editable, so tests see the working tree. What an environment was
built from is kept in it as a hash; it is rebuilt from nothing when that changes, and a build that failed
leaves none. The own packages have a hash of theirs: to install them again takes seconds.
"""

import hashlib
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
OWN_PACKAGES = ("radix_transfer_plugins", "radix_engine_plugins")
STAMP, OWN_STAMP = ".inputs", ".own-inputs"


def build(name: str) -> Path:
    """The environment's folder, ready to use."""
    source = HERE / name
    if not (source / "environment.toml").is_file():
        known = sorted(path.parent.name for path in HERE.glob("*/environment.toml"))
        raise SystemExit(f"unknown environment {name!r}; known: {', '.join(known)}")
    settings = tomllib.loads((source / "environment.toml").read_text())
    target = REPOSITORY / settings["target"]
    inputs = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    if not _is_current(target / STAMP, inputs):
        print(f"building {target} (once; minutes) ...", file=sys.stderr, flush=True)
        shutil.rmtree(target, ignore_errors=True)
        venv.create(target, with_pip=True)
        _install(source, target, settings)
        (target / STAMP).write_text(_hash(inputs))
    own_inputs = [REPOSITORY / own / "pyproject.toml" for own in OWN_PACKAGES]
    if not _is_current(target / OWN_STAMP, own_inputs):
        for own in OWN_PACKAGES:
            _pip(target, "--no-deps", "--no-build-isolation", "-e", str(REPOSITORY / own))
        (target / OWN_STAMP).write_text(_hash(own_inputs))
    return target


def _install(source: Path, target: Path, settings: dict) -> None:
    (target / "constraints.txt").write_text("".join(f"{line}\n" for line in settings["constraints"]))
    _pip(target, *settings["constraints"])
    _pip(target, "-r", str(source / "requirements.txt"))
    _pip(target, "--no-deps", "-r", str(source / "no-deps.txt"))
    if (source / "site").is_dir():
        site = _site_packages(target / "bin" / "python")
        for path in (source / "site").iterdir():
            shutil.copy(path, site)
    # Copied first: a build writes beside its sources.
    package = Path(shutil.copytree(source / "package", target / "package"))
    _pip(target, "--no-deps", "--no-build-isolation", str(package))


def _pip(target: Path, *arguments: str) -> None:
    command = [target / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*command, "-c", target / "constraints.txt", *arguments], check=True, stdout=sys.stderr)


def _site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(
        subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    )


def _is_current(stamp: Path, inputs: list[Path]) -> bool:
    return stamp.is_file() and stamp.read_text() == _hash(inputs)


def _hash(inputs: list[Path]) -> str:
    digest = hashlib.sha256(repr(sys.version_info[:2]).encode())
    for path in sorted(inputs):
        digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: {sys.argv[0]} NAME")
    print(build(sys.argv[1]))
