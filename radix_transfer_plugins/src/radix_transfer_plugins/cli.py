"""`radix-store`: look at a store and clean it, whatever its backend."""

import argparse
import contextlib
import json
import logging
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from radix_transfer_plugins.backends.base import ObjectInfo
from radix_transfer_plugins.errors import FieldMissingError, OutputStoreError, RefError
from radix_transfer_plugins.ref import StoreRef
from radix_transfer_plugins.registry import backend_names, create_backend
from radix_transfer_plugins.sizes import format_bytes, format_seconds, parse_bytes, parse_seconds
from radix_transfer_plugins.store import OutputStore

EPILOG = """exit status: 0 done, 1 the store refused or failed (the reason is on stderr), 2 wrong usage.

examples:
  radix-store stat --backend shared_memory
  radix-store list --backend mooncake --config mooncake.json --key-prefix run-1
  # What would be removed, then its removal.
  radix-store gc --backend shared_memory --key-prefix run-1 --older-than 2h
  radix-store gc --backend shared_memory --key-prefix run-1 --older-than 2h --delete
  radix-store cat ref.json --key-prefix run-1 --npy arrays/
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        with contextlib.nullcontext() if arguments.verbose else _quiet_libraries():
            _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has seen enough, as `head` does. What Python still flushes goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OutputStoreError, OSError) as error:
        print(f"radix-store: {error}", file=sys.stderr)
        return 1
    return 0


def _run(arguments: argparse.Namespace) -> None:
    """One command on a store that is there already: a mistyped name does not make one."""
    name = arguments.backend
    if arguments.run is cat:
        arguments.ref = _parse_ref(arguments.ref)
        name = name or arguments.ref.backend
    backend = create_backend(name, _text_or_file(arguments.config), existing=True)
    store = OutputStore(backend, key_prefix=arguments.key_prefix)
    try:
        arguments.run(store, arguments)
    finally:
        store.close()


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Native clients, Mooncake's above all, log to the descriptor of stderr, whatever Python does with it."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def stat(store: OutputStore, arguments: argparse.Namespace) -> None:
    """Figures of the whole store, and of what lies below the key prefix."""
    whole = store.backend.stats()
    below = list(store.list_objects())
    figures: dict[str, Any] = {
        "backend": store.backend.name,
        "objects": whole.objects,
        "used_bytes": whole.used_bytes,
        "capacity_bytes": whole.capacity_bytes,
        "key_prefix": store.key_prefix,
        "prefix_objects": len(below),
        "prefix_bytes": sum(info.stored_bytes for info in below),
        "prefix_oldest_s": min((info.created_s for info in below), default=None),
    }
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name.removesuffix('_bytes').removesuffix('_s'):<14} {_readable(name, value)}")


def list_objects(store: OutputStore, arguments: argparse.Namespace) -> None:
    """Size, age and key of each object below the key prefix, oldest first."""
    _print_objects(
        sorted(store.list_objects(older_than_s=arguments.older_than), key=_age_order), arguments.json
    )


def collect_garbage(store: OutputStore, arguments: argparse.Namespace) -> None:
    """Remove what is older than `--older-than`; without `--delete` only say what that would be."""
    found = sorted(store.list_objects(older_than_s=arguments.older_than), key=_age_order)
    if arguments.delete:
        removed = store.delete_objects(older_than_s=arguments.older_than)
    else:
        removed = 0
    if arguments.json:
        print(json.dumps({"found": [msgspec.to_builtins(info) for info in found], "removed": removed}))
        return
    _print_objects(found, as_json=False)
    size = f"{len(found)} objects, {format_bytes(sum(info.stored_bytes for info in found))}"
    if arguments.delete:
        print(f"removed {removed} objects")
    else:
        print(f"would remove {size}; nothing was removed, add --delete to do so")


def cat(store: OutputStore, arguments: argparse.Namespace) -> None:
    """Read the fields of a reference: print them, or write them as .npy files."""
    ref: StoreRef = arguments.ref
    names = arguments.field or list(ref.fields)
    unknown = [name for name in names if name not in ref.fields]
    if unknown:
        raise FieldMissingError(
            f"the reference holds no field {unknown[0]!r}; it holds: {', '.join(ref.fields)}"
        )
    # A type made of exactly these fields reads stashes of every kind.
    stash_type = msgspec.defstruct("AnyStash", [(name, np.ndarray) for name in names])
    (stash,) = store.read_many([(ref, names)], stash_type=stash_type, buffer_bytes=arguments.buffer_bytes)
    arrays = {name: getattr(stash, name) for name in names}
    if arguments.npy is not None:
        arguments.npy.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            np.save(arguments.npy / f"{name}.npy", array)
    for name, array in arrays.items():
        spec = ref.fields[name]
        if arguments.json:
            print(
                json.dumps(
                    {"field": name, **msgspec.to_builtins(spec), "values": array.tolist()}, default=str
                )
            )
            continue
        rows = f" rows [{spec.start_row}, {spec.end_row})" if spec.shape else ""
        print(f"{name}: {spec.dtype} {list(spec.shape)}{rows} {spec.codec} {format_bytes(spec.stored_bytes)}")
        if arguments.npy is None:
            print(np.array2string(array, threshold=200, edgeitems=3))


def _parse_ref(given: str) -> StoreRef:
    """Raises RefError."""
    try:
        return StoreRef.from_builtins(msgspec.json.decode(_text_or_file(given) or ""))
    except msgspec.DecodeError as error:
        raise RefError(f"expected a reference as JSON text, a file of it or '-': {error}") from error


def _readable(name: str, value: Any) -> str:
    """A figure of `stat` for people."""
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return format_bytes(value)
    return f"{format_seconds(time.time() - value)} ago" if name.endswith("_s") else str(value)


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--config", metavar="JSON", help="the backend's configuration, as JSON text or a file of it"
    )
    common.add_argument(
        "--key-prefix", metavar="PREFIX", help="default: the backend's; nothing outside it is touched"
    )
    common.add_argument("--json", action="store_true", help="machine-readable output: bytes and Unix time")
    common.add_argument(
        "--verbose", action="store_true", help="show what the backend's own library logs, on stderr"
    )
    parser = argparse.ArgumentParser(
        prog="radix-store",
        description="Look at an output store and clean it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any) -> argparse.ArgumentParser:
        made = commands.add_parser(name, parents=[common], help=run.__doc__, description=run.__doc__)
        made.set_defaults(run=run)
        by_ref = run is cat
        made.add_argument(
            "--backend",
            required=not by_ref,
            metavar="NAME",
            help=f"one of: {', '.join(backend_names())}{'; default: the one of REF' if by_ref else ''}",
        )
        return made

    age_help = "such as 90s, 30m, 2h or 1d"
    command("stat", stat)
    lister = command("list", list_objects)
    lister.add_argument(
        "--older-than", type=_seconds, default=0.0, metavar="AGE", help=f"{age_help}; default: any age"
    )
    collector = command("gc", collect_garbage)
    collector.add_argument("--older-than", type=_seconds, required=True, metavar="AGE", help=age_help)
    collector.add_argument(
        "--delete", action="store_true", help="really remove it; without this nothing is removed"
    )
    printer = command("cat", cat)
    printer.add_argument(
        "ref", metavar="REF", help="a reference as JSON text, a file of it, or - for standard input"
    )
    printer.add_argument("--field", action="append", metavar="NAME", help="only this field; may be repeated")
    printer.add_argument(
        "--npy", type=pathlib.Path, metavar="DIR", help="write DIR/<field>.npy in place of the values"
    )
    printer.add_argument("--buffer-bytes", type=_size, default=1 << 30, metavar="SIZE", help="default: 1gb")
    return parser


def _seconds(text: str) -> float:
    try:
        return parse_seconds(float(text) if text.replace(".", "", 1).isdigit() else text, "--older-than")
    except OutputStoreError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _size(text: str) -> int:
    try:
        return parse_bytes(text, "--buffer-bytes")
    except OutputStoreError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _text_or_file(value: str | None) -> str | None:
    """JSON text itself, or what the named file or standard input holds."""
    if value is None or value.lstrip().startswith(("{", "[")):
        return value
    return sys.stdin.read() if value == "-" else pathlib.Path(value).read_text()


def _age_order(info: ObjectInfo) -> tuple[float, str]:
    return info.created_s, info.key


def _print_objects(objects: Sequence[ObjectInfo], as_json: bool) -> None:
    if as_json:
        print(json.dumps([msgspec.to_builtins(info) for info in objects]))
        return
    now = time.time()
    for info in objects:
        age, size = format_seconds(now - info.created_s), format_bytes(info.stored_bytes)
        print(f"{age:>8} {size:>12}  {info.key}")
