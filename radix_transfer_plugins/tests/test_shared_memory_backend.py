"""The shared_memory backend alone: configuration, safety of its files, limits, damage."""

import errno
import mmap
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec
import numpy as np
import pytest

from radix_transfer_plugins import OutputStore, TokenOutputStash, create_backend
from radix_transfer_plugins.backends.base import BackendStats
from radix_transfer_plugins.backends.shared_memory import SharedMemoryBackend
from radix_transfer_plugins.backends.shared_memory.space import Space
from radix_transfer_plugins.errors import (
    ConfigError,
    CorruptObjectError,
    KeyExistsError,
    ObjectLostError,
    StoreFullError,
    StoreUnavailableError,
)

_MAP_NORESERVE = 0x4000
"""Of Linux; Python names it from 3.13 on."""

Connect = Callable[..., SharedMemoryBackend]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"spaces": "a"}, "unknown option 'spaces'; known options: space, directory, capacity_bytes"),
        ({"space": "../etc"}, "'../etc'"),
        ({"space": "a", "directory": "/dev/shm/b"}, "exclude each other"),
        ({"capacity_bytes": "much"}, "capacity_bytes"),
        ({"wait_s": -1}, "wait_s"),
        ({"key_prefix": "/x"}, "key_prefix"),
        ({"directory": "/nowhere/at/all"}, "--shm-size"),
    ],
)
def test_wrong_configuration_is_refused_with_the_known_choices_or_the_remedy(
    config: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named.replace("(", r"\(").replace(".", r"\.")):
        create_backend("shared_memory", config)


def test_keys_of_any_text_and_length_are_stored_and_listed(connect: Connect) -> None:
    backend = connect()
    keys = [
        "a/b",
        "../../etc/passwd",
        "..",
        ".",
        "ünï/😀",
        "new\nline",
        "%2F",
        "k" * 5000,
        "k" * 5001,
        "a/b/",
    ]
    backend.put_batch([(key, key.encode()) for key in keys])
    with backend.get_batch(keys) as lease:
        assert [bytes(view) for view in lease.views] == [key.encode() for key in keys]
    assert {info.key for info in backend.list("")} == set(keys)
    assert {info.key for info in backend.list("k" * 5000)} == {"k" * 5000, "k" * 5001}
    backend.delete_batch(keys)
    assert list(backend.list("")) == []


def test_files_are_private_and_a_directory_that_others_enter_is_refused(
    connect: Connect, directory: Path
) -> None:
    connect().put_batch([("a", b"x")])
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [directory, *directory.rglob("*")]}
    assert {mode & 0o077 for mode in modes.values()} == {0}
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        connect()


def test_memory_that_a_view_keeps_after_the_object_was_deleted_is_counted(connect: Connect) -> None:
    backend = connect()
    store = OutputStore(backend, key_prefix="a")
    (ref,) = store.put_many([TokenOutputStash(routed_experts=np.ones((1000, 100, 8), np.int32))])
    with store.get_many([(ref, ["routed_experts"])], stash_type=TokenOutputStash) as (stash,):
        assert stash.routed_experts is not None
        kept = np.asarray(stash.routed_experts)
    store.delete_many([ref])
    stats = backend.stats()
    assert (stats.objects, stats.used_bytes) == (0, 0)
    assert 3_200_000 <= stats.lent_bytes < 3_210_000
    assert kept[999, 99, 7] == 1
    del kept, stash
    assert backend.stats().lent_bytes == 0


def test_symbolic_links_are_not_followed(connect: Connect, directory: Path, tmp_path: Path) -> None:
    backend = connect()
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (directory / "objects" / "k-a").symlink_to(secret)
    with pytest.raises(CorruptObjectError, match="symbolic link"):
        backend.get_batch(["a"])
    with pytest.raises((KeyExistsError, CorruptObjectError)):
        backend.put_batch([("a", b"x")])
    # Neither listing nor counting anew is stopped by it.
    assert list(backend.list("")) == []
    (directory / "usage").unlink()
    assert connect().stats() == BackendStats(0, 0, None)
    backend.delete_batch(["a"])
    assert secret.read_bytes() == b"secret"
    linked = directory.with_name("linked")
    linked.symlink_to(directory)
    with pytest.raises(ConfigError, match="symbolic link"):
        create_backend("shared_memory", {"directory": str(linked)})


def test_truncated_and_overwritten_objects_are_typed_errors(connect: Connect, directory: Path) -> None:
    backend = connect()
    sizes = {"small": 100, "large": 1 << 20}
    backend.put_batch([(key, bytes(size)) for key, size in sizes.items()])
    for key, size in sizes.items():
        path = directory / "objects" / f"k-{key}"
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(CorruptObjectError, match=key):
            backend.get_batch([key])
        with pytest.raises(CorruptObjectError, match=key):
            backend.get_batch_into([key], [memoryview(bytearray(size))])
        for damage in (b"", b"\xff" * 200):
            path.write_bytes(damage)
            with pytest.raises(CorruptObjectError):
                backend.get_batch([key])
        backend.delete_batch([key])
        with pytest.raises(ObjectLostError):
            backend.get_batch([key])


def test_damaged_objects_are_listed_by_their_name_so_that_gc_removes_them(
    connect: Connect, directory: Path
) -> None:
    backend = connect()
    keys = ["run/a b", "run/%2F", "run/small"]
    backend.put_batch([(key, bytes(100)) for key in keys])
    os.truncate(directory / "objects" / "k-run%2Fa%20b", 10)
    (directory / "objects" / "k-run%2F%252F").write_bytes(b"")
    (directory / "objects" / "k-run/foreign".replace("/", "%2f")).write_bytes(b"spelt as no key of ours")
    assert {info.key: info.stored_bytes for info in backend.list("run/")} == dict(
        zip(keys, [0, 0, 100], strict=True)
    )
    backend.delete_batch(keys)
    assert list(backend.list("")) == []


def test_reading_an_object_with_holes_takes_no_room_of_the_tmpfs(connect: Connect, directory: Path) -> None:
    class Rows(msgspec.Struct):
        rows: np.ndarray

    store = OutputStore(connect())
    rows = np.zeros((257, 1 << 20), np.uint8)
    rows[100, 5] = rows[200, 7] = 1
    (ref,) = store.put_many([Rows(rows)])
    (path,) = (directory / "objects").iterdir()
    taken = path.stat().st_blocks
    assert 512 * taken < 8 << 20
    with store.get_many([(ref, ["rows"])], stash_type=Rows) as (stash,):
        assert np.array_equal(stash.rows, rows)
    assert path.stat().st_blocks == taken
    store.delete_many([ref])


def test_reading_into_a_buffer_of_another_length_is_refused(connect: Connect) -> None:
    backend = connect()
    backend.put_batch([("a", b"12345")])
    for length in (4, 6):
        with pytest.raises(CorruptObjectError, match=f"expected {length} bytes, the store holds 5"):
            backend.get_batch_into(["a"], [memoryview(bytearray(length))])
    buffer = bytearray(5)
    backend.get_batch_into(["a"], [memoryview(buffer)])
    assert buffer == b"12345"


def test_capacity_holds_over_processes_and_the_error_names_the_sizes(connect: Connect) -> None:
    one, other = connect(capacity_bytes=1000, wait_s=0.2), connect(capacity_bytes=1000, wait_s=0.2)
    one.put_batch([("a", bytes(600))])
    with pytest.raises(StoreFullError, match=r"500 bytes .* used 600 bytes in 1 objects, free 400.* 1000"):
        other.put_batch([("b", bytes(500))])
    other.put_batch([("c", bytes(400))])
    assert one.stats() == other.stats()
    assert (one.stats().objects, one.stats().used_bytes) == (2, 1000)


def test_what_the_tmpfs_cannot_hold_is_refused_before_it_is_written(connect: Connect) -> None:
    backend = connect(wait_s=0.1)
    disk = os.statvfs(backend.config.path)
    # Address space alone: not a page of it is ever touched.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    too_much = mmap.mmap(-1, disk.f_blocks * disk.f_frsize + (1 << 30), flags=flags)
    with pytest.raises(StoreFullError, match="tmpfs of"):
        backend.put_batch([("small", b"x"), ("huge", memoryview(too_much))])
    assert list(backend.list("")) == []
    assert backend.stats().used_bytes == 0


def test_a_tmpfs_that_fills_up_during_a_put_is_a_full_store(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = connect(wait_s=0.1)
    write = os.writev

    def half(file: int, parts: list[bytes]) -> int:
        write(file, [part[: len(part) // 2] for part in parts])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", half)
        with pytest.raises(StoreFullError, match="tmpfs of"):
            backend.put_batch([("a", bytes(100_000)), ("b", b"x")])
    assert list(backend.list("")) == []
    assert backend.stats() == BackendStats(0, 0, None)
    backend.put_batch([("a", b"1"), ("b", b"2")])


@pytest.mark.parametrize(
    ("step", "call"),
    [
        ("reserve", 1),
        ("_write_reserved", 1),
        ("_link", 1),
        ("_link", 2),
        ("_write_reserved", 2),
        ("publish", 1),
    ],
)
def test_an_interrupt_after_any_step_of_a_put_leaves_the_accounting_exact(
    step: str, call: int, connect: Connect, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pair(msgspec.Struct):
        a: np.ndarray
        b: np.ndarray

    backend = connect(capacity_bytes=1000)
    store = OutputStore(backend)
    backend.put_batch([("kept", bytes(10))])
    calls = 0
    original = getattr(Space, step)

    def interrupted(self: Space, *args: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        result = original(self, *args, **named)
        if calls == call:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Space, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.put_many([Pair(np.zeros(100, np.uint8), np.zeros(200, np.uint8))])
    assert calls >= call
    assert [info.key for info in backend.list("")] == ["kept"]
    assert backend.stats() == BackendStats(1, 10, 1000)
    (client,) = (directory / "clients").iterdir()
    assert client.read_bytes() == bytes(8)


def test_a_put_that_waits_for_room_counts_the_objects_once(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = connect(capacity_bytes=10, wait_s=0.3)
    backend.put_batch([("a", bytes(10))])
    counted = []
    recount = Space._recount
    monkeypatch.setattr(Space, "_recount", lambda self: (counted.append(1), recount(self)))
    with pytest.raises(StoreFullError):
        backend.put_batch([("b", b"x")])
    assert len(counted) == 1


def test_a_taken_key_is_told_without_waiting_for_room(connect: Connect) -> None:
    backend = connect(capacity_bytes=10, wait_s=60)
    backend.put_batch([("a", bytes(10))])
    began = time.monotonic()
    with pytest.raises(KeyExistsError, match="'a' is taken"):
        backend.put_batch([("a", b"x"), ("b", b"y")])
    assert time.monotonic() - began < 30
    assert [info.key for info in backend.list("")] == ["a"]
    assert backend.stats().used_bytes == 10


def test_closing_waits_for_a_put_that_runs_and_ends_one_that_waits(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, other = connect(capacity_bytes=10, wait_s=30), connect()
    writing, go_on = threading.Event(), threading.Event()
    write = os.writev

    def slow(file: int, parts: list[bytes]) -> int:
        writing.set()
        assert go_on.wait(20)
        return write(file, parts)

    monkeypatch.setattr(os, "writev", slow)
    with ThreadPoolExecutor(3) as pool:
        runs = pool.submit(backend.put_batch, [("a", bytes(10))])
        assert writing.wait(20)
        waits = pool.submit(backend.put_batch, [("b", bytes(10))])
        closed = pool.submit(backend.close)
        with pytest.raises(StoreUnavailableError, match="closed"):
            waits.result(20)
        assert not closed.done()
        go_on.set()
        runs.result(20)
        closed.result(20)
    assert [info.key for info in other.list("")] == ["a"]
    assert other.stats().used_bytes == 10


def test_a_directory_removed_under_the_store_is_a_typed_error(connect: Connect, directory: Path) -> None:
    backend = connect()
    shutil.rmtree(directory)
    with pytest.raises(StoreUnavailableError, match="create a new backend"):
        backend.put_batch([("a", b"x")])


def test_a_relative_directory_stays_where_it_was(
    connect: Connect, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory.parent)
    backend = connect(directory=directory.name)
    monkeypatch.chdir("/")
    assert backend.config.path == directory


def test_a_forked_child_uses_its_parents_backend_with_locks_of_its_own(connect: Connect) -> None:
    backend = connect()
    backend.put_batch([("parent", b"1")])
    child = get_context("fork").Process(target=lambda: backend.put_batch([("child", b"2")]))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    backend.put_batch([("after", b"3")])
    assert {info.key for info in backend.list("")} == {"parent", "child", "after"}
    assert backend.stats().used_bytes == 3


def test_a_removed_accounting_file_is_counted_anew(connect: Connect, directory: Path) -> None:
    first = connect()
    first.put_batch([("a", bytes(10)), ("b", bytes(20))])
    first.close()
    (directory / "usage").unlink()
    assert connect().stats().used_bytes == 30
    (directory / "usage").write_bytes(b"RADIXSU9" + bytes(24))
    with pytest.raises(ConfigError, match="another version"):
        connect()
