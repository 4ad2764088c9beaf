"""Builds or reuses the environment of one engine: `python build.py sglang_cpu` prints its folder.

An environment is described by a folder beside this file:
    environment.toml   target folder (below the repository), index-wide constraints
    requirements.txt   installed with their dependencies
    no-deps.txt        installed alone, since their dependencies need a GPU
    site/              files copied into site-packages
    package/           a package of ours, installed
The project's own packages are installed editable, so tests see the working tree. What an environment was
built from is kept in it as a hash; it is rebuilt from nothing when that changes, and a build that failed
leaves none.
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
STAMP = ".inputs"


def build(name: str) -> Path:
    """The environment's folder, ready to use."""
    source = HERE / name
    if not (source / "environment.toml").is_file():
        known = sorted(path.parent.name for path in HERE.glob("*/environment.toml"))
        raise SystemExit(f"unknown environment {name!r}; known: {', '.join(known)}")
    settings = tomllib.loads((source / "environment.toml").read_text())
    target = REPOSITORY / settings["target"]
    wanted = _hash_of_inputs(source)
    stamp = target / STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        return target
    print(f"building {target} (once; minutes) ...", file=sys.stderr, flush=True)
    shutil.rmtree(target, ignore_errors=True)
    venv.create(target, with_pip=True)
    _install(source, target, settings)
    stamp.write_text(wanted)
    return target


def _install(source: Path, target: Path, settings: dict) -> None:
    python = target / "bin" / "python"
    constraints = target / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in settings["constraints"]))

    def pip(*arguments: str) -> None:
        command = [
            python,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "-q",
            "-c",
            constraints,
            *arguments,
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)

    pip(*settings["constraints"])
    pip("-r", str(source / "requirements.txt"))
    pip("--no-deps", "-r", str(source / "no-deps.txt"))
    site = _site_packages(python)
    for path in (source / "site").iterdir():
        shutil.copy(path, site)
    # Copied first: a build writes beside its sources.
    package = Path(shutil.copytree(source / "package", target / "package"))
    pip("--no-deps", "--no-build-isolation", str(package))
    for own in OWN_PACKAGES:
        pip("--no-deps", "--no-build-isolation", "-e", str(REPOSITORY / own))


def _site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(
        subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    )


def _hash_of_inputs(source: Path) -> str:
    files = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    files += [REPOSITORY / own / "pyproject.toml" for own in OWN_PACKAGES]
    digest = hashlib.sha256(f"{sys.version_info[:2]} {Path(__file__).read_text()}".encode())
    for path in sorted(files):
        digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: {sys.argv[0]} NAME")
    print(build(sys.argv[1]))
