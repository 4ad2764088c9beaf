"""Processes killed at every stage, races and full stores: whole data or a typed error, and nothing left."""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from radix_transfer_plugins import OutputStore
from radix_transfer_plugins.backends.shared_memory import SharedMemoryBackend, layout, space
from radix_transfer_plugins.errors import (
    CorruptObjectError,
    KeyExistsError,
    ObjectLostError,
    OutputStoreError,
    StoreFullError,
)

Connect = Callable[..., SharedMemoryBackend]
FORK = get_context("fork")
BATCH = {"batch/a": b"a" * 1000, "batch/b": b"b" * 300_000, "batch/c": b""}


def die(*_: object, **__: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(function: Callable[..., Any], number: int, *, after: bool = False) -> Callable[..., Any]:
    """`function`, but its call with this number (from 1) kills the process before or after it is made."""
    calls = 0

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            die()
        result = function(*args, **named)
        if calls == number:
            die()
        return result

    return counted


def at_journal(state: int) -> Callable[..., Any]:
    """`Space._set_usage` that kills the process right after it wrote this journal state."""
    original = space.Space._set_usage

    def written(self: space.Space, *, journal: int | None = None, **named: int) -> None:
        original(self, journal=journal, **named)
        if journal == state:
            die()

    return written


def half_written(file: int, parts: list[Any]) -> Any:
    os.write(file, parts[0])
    die()


STAGES: dict[str, tuple[Callable[[], tuple[Any, str, Any]], bool]] = {
    "reserved": (lambda: (space.Space, "reserve", at_call(space.Space.reserve, 1, after=True)), False),
    "half written": (lambda: (os, "writev", half_written), False),
    "written": (lambda: (space.Space, "publish", die), False),
    "journal changing": (lambda: (space.Space, "_set_usage", at_journal(layout.CHANGING)), False),
    "one of three named": (lambda: (os, "link", at_call(os.link, 1, after=True)), False),
    "two of three named": (lambda: (os, "link", at_call(os.link, 2, after=True)), False),
    "all named": (lambda: (os, "link", at_call(os.link, 3, after=True)), False),
    "journal committed": (lambda: (space.Space, "_set_usage", at_journal(layout.COMMITTED)), True),
    "one of three visible": (lambda: (os, "pwrite", at_call(os.pwrite, 1, after=True)), True),
    "all visible": (lambda: (os, "pwrite", at_call(os.pwrite, 3, after=True)), True),
    "journal idle": (lambda: (space.Space, "_set_usage", at_journal(layout.IDLE)), True),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_writer_killed_at_any_stage_leaves_all_or_nothing(
    stage: str, connect: Connect, directory: Path
) -> None:
    patch, survives = STAGES[stage]
    reader = connect(capacity_bytes=400_000, wait_s=5)

    def put_and_die() -> None:
        writer = connect(capacity_bytes=400_000)
        owner, name, replacement = patch()
        setattr(owner, name, replacement)
        writer.put_batch(list(BATCH.items()))

    child = FORK.Process(target=put_and_die)
    child.start()
    child.join(20)
    assert child.exitcode == -signal.SIGKILL
    if survives:
        with reader.get_batch(list(BATCH)) as lease:
            assert [bytes(view) for view in lease.views] == list(BATCH.values())
        assert reader.stats().objects == 3
        reader.delete_batch(list(BATCH))
    else:
        for key in BATCH:
            with pytest.raises(ObjectLostError):
                reader.get_batch([key])
    # Nothing blocks the keys or the room: the batch needs most of the capacity.
    reader.put_batch(list(BATCH.items()))
    assert {info.key for info in reader.list("")} == set(BATCH)
    reader.delete_batch(list(BATCH))
    assert (reader.stats().objects, reader.stats().used_bytes) == (0, 0)
    assert list((directory / "objects").iterdir()) == []
    assert len(list((directory / "clients").iterdir())) == 1


def test_a_writer_killed_while_it_holds_the_lock_blocks_nobody(connect: Connect) -> None:
    backend = connect()

    def hold_and_die() -> None:
        with connect()._space._locked():
            die()

    child = FORK.Process(target=hold_and_die)
    child.start()
    child.join(20)
    began = time.monotonic()
    backend.put_batch([("a", b"x")])
    assert time.monotonic() - began < 5


def test_a_process_killed_while_it_cleans_up_after_another_leaves_the_accounting_exact(
    connect: Connect,
) -> None:
    backend = connect()

    def reserve_and_die() -> None:
        connect()._space.reserve(space.Claim(), 500, None, recount=False)
        die()

    def clean_up_and_die() -> None:
        space.Space._recount = die
        connect()

    for action in (reserve_and_die, clean_up_and_die):
        child = FORK.Process(target=action)
        child.start()
        child.join(20)
        assert child.exitcode == -signal.SIGKILL
    assert backend.stats().used_bytes == 0


def test_a_child_that_outlives_its_killed_parent_keeps_neither_the_lock_nor_the_room(
    connect: Connect,
) -> None:
    backend = connect(capacity_bytes=1000, wait_s=5)

    def reserve_fork_and_die(forked: Connection) -> None:
        writer = connect()._space
        assert writer.reserve(space.Claim(), 800, 1000, recount=False)
        with writer._locked():
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            forked.send(child)
            die()

    ours, theirs = FORK.Pipe()
    parent = FORK.Process(target=reserve_fork_and_die, args=(theirs,))
    parent.start()
    orphan = ours.recv()
    try:
        parent.join(20)
        began = time.monotonic()
        backend.put_batch([("a", bytes(900))])
        assert time.monotonic() - began < 4
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_reader_killed_with_views_leaks_nothing(connect: Connect, directory: Path) -> None:
    backend = connect()
    backend.put_batch([("a", np.ones(64 << 20, np.uint8))])

    def hold(ready: Connection) -> None:
        lease = connect().get_batch(["a"])
        ready.send(lease.views[0][0])
        time.sleep(60)

    ours, theirs = FORK.Pipe()
    child = FORK.Process(target=hold, args=(theirs,))
    child.start()
    assert ours.poll(20)
    assert ours.recv() == 1
    backend.delete_batch(["a"])
    held = os.statvfs(directory).f_bavail
    child.kill()
    child.join(20)
    assert (os.statvfs(directory).f_bavail - held) * os.statvfs(directory).f_frsize > 32 << 20
    assert list(backend.list("")) == []
    assert len(list((directory / "clients").iterdir())) == 1


def test_of_two_processes_with_overlapping_batches_one_wins_each_round(connect: Connect) -> None:
    rounds = 30
    backend = connect()
    start = FORK.Barrier(2)

    def race(name: str, keys: tuple[str, str], results: Connection) -> None:
        writer = connect()
        won = []
        for turn in range(rounds):
            start.wait(20)
            try:
                writer.put_batch([(f"{turn}/{key}", name.encode() * 50_000) for key in keys])
                won.append(True)
            except KeyExistsError:
                won.append(False)
        results.send(won)

    outcomes = []
    children = []
    for name, keys in (("x", ("a", "b")), ("y", ("b", "c"))):
        ours, theirs = FORK.Pipe()
        children.append(FORK.Process(target=race, args=(name, keys, theirs)))
        children[-1].start()
        outcomes.append(ours)
    x_won, y_won = (outcome.recv() for outcome in outcomes)
    for child in children:
        child.join(20)
    assert all(x != y for x, y in zip(x_won, y_won, strict=True))
    expected = {
        f"{turn}/{key}" for turn in range(rounds) for key in (("a", "b") if x_won[turn] else ("b", "c"))
    }
    assert {info.key for info in backend.list("")} == expected
    for turn in range(rounds):
        with backend.get_batch([f"{turn}/b"]) as lease:
            assert bytes(lease.views[0]) == (b"x" if x_won[turn] else b"y") * 50_000


def test_readers_see_a_batch_whole_or_not_at_all_while_it_is_published(connect: Connect) -> None:
    backend, reader = connect(), connect()
    stop = threading.Event()
    torn: list[str] = []

    def watch() -> None:
        while not stop.is_set():
            for turn in range(200):
                seen = []
                # In reverse order of publishing: once a late one is there, the early ones must be.
                for key in ("c", "b", "a"):
                    try:
                        reader.get_batch([f"{turn}/{key}"]).release()
                        seen.append(True)
                    except ObjectLostError:
                        seen.append(False)
                if seen != sorted(seen):
                    torn.append(f"{turn}: {seen}")
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for turn in range(200):
        backend.put_batch([(f"{turn}/{key}", b"x") for key in "abc"])
    stop.set()
    watcher.join()
    assert torn == []


def test_concurrent_puts_with_room_for_one_all_finish(connect: Connect) -> None:
    backend = connect(capacity_bytes=1000, wait_s=20)

    def put_then_delete(number: int) -> None:
        backend.put_batch([(f"k{number}", bytes(800))])
        backend.delete_batch([f"k{number}"])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put_then_delete, range(8)))
    assert (backend.stats().objects, backend.stats().used_bytes) == (0, 0)


def test_concurrent_puts_with_room_for_one_and_no_delete_leave_one(connect: Connect) -> None:
    backend = connect(capacity_bytes=1000, wait_s=0.3)

    def put(number: int) -> bool:
        try:
            backend.put_batch([(f"k{number}", bytes(800))])
        except StoreFullError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(put, range(8))).count(True) == 1
    assert (backend.stats().objects, backend.stats().used_bytes) == (1, 800)


def test_a_flipped_byte_is_a_corrupt_object(connect: Connect, directory: Path) -> None:
    class Rows(msgspec.Struct):
        rows: np.ndarray

    store = OutputStore(connect())
    (ref,) = store.put_many([Rows(np.arange(100_000, dtype=np.int32))])
    (path,) = (directory / "objects").iterdir()
    with path.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(b"\xaa")
    with pytest.raises(CorruptObjectError, match="checksum"):
        store.read_many([(ref, ["rows"])], stash_type=Rows, buffer_bytes=1 << 20)
    with pytest.raises(OutputStoreError), store.get_many([(ref, ["rows"])], stash_type=Rows):
        pass
    store.delete_many([ref])
    assert list(store.list_objects()) == []


def test_a_stash_above_4_gib_goes_through_the_store_and_reading_it_takes_its_data_only(
    connect: Connect,
) -> None:
    class Rows(msgspec.Struct):
        rows: np.ndarray

    store = OutputStore(connect())
    rows = np.zeros(((5 << 20) + 1, 1024), np.uint8)
    marks = {(0, 0): 1, ((4 << 20) - 1, 1023): 2, (4 << 20, 0): 3, (5 << 20, 1023): 4}
    for position, mark in marks.items():
        rows[position] = mark
    (ref,) = store.put_many([Rows(rows)])
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    part_of = (ref, ["rows"], {"rows": ((4 << 20) - 1, (4 << 20) + 1)})
    with store.get_many([(ref, ["rows"]), part_of], stash_type=Rows) as (whole, part):
        assert whole.rows.shape == rows.shape
        assert {position: whole.rows[position] for position in marks} == marks
        assert np.array_equal(np.flatnonzero(part.rows), [1023, 1024])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - largest < 64 << 10  # KiB
    store.delete_many([ref])


def test_fields_above_4_gib_keep_their_length_and_bytes(connect: Connect) -> None:
    backend = connect()
    size = (5 << 30) + 3
    value = np.zeros(size, np.uint8)
    marks = {0: 1, (4 << 30) - 1: 2, 4 << 30: 3, size - 1: 4}
    for position, mark in marks.items():
        value[position] = mark
    backend.put_batch([("big/a", value), ("big/b", b"small")])
    assert {info.key: info.stored_bytes for info in backend.list("big/")} == {"big/a": size, "big/b": 5}
    with backend.get_batch(["big/a"]) as lease:
        view = lease.views[0]
        assert len(view) == size
        assert {position: view[position] for position in marks} == marks
        assert not any(view[(4 << 30) - 1000 : (4 << 30) - 1])
    backend.delete_batch(["big/a", "big/b"])
