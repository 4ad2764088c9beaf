"""What every backend promises to `OutputStore`, as tests.

class TestMyBackend(BackendConformance):
    @pytest.fixture
    def connect(self):
        return lambda: create_backend("my_backend", {...})

    @pytest.fixture
    def connect_small(self):
        return lambda: create_backend("my_backend", {"capacity": "1mb", ...})
"""

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from radix_transfer_plugins.backends.base import Backend
from radix_transfer_plugins.errors import (
    CorruptObjectError,
    KeyExistsError,
    ObjectLostError,
    ReleasedViewError,
    StoreFullError,
    StoreUnavailableError,
)
from radix_transfer_plugins.ref import StoreRef
from radix_transfer_plugins.store import OutputStore

Connect = Callable[[], Backend]


class ConformanceStash(msgspec.Struct, kw_only=True, eq=False):
    rows: np.ndarray | None = None
    scores: np.ndarray | None = None


class BackendConformance:
    """Subclass it, define the two fixtures, and every test of it runs against your backend."""

    small_capacity_bytes: ClassVar[int] = 1 << 20
    """Room of the small store: a quarter of it always fits into the empty store, twice of it never does."""
    big_value_bytes: ClassVar[int] = 32 << 20
    """A value that the store of `connect` has room for."""

    @pytest.fixture
    def connect(self) -> Connect:
        """Each call gives another client of one and the same store.

        Whoever defines it removes the store afterwards.
        """
        raise NotImplementedError("define the fixture `connect`")

    @pytest.fixture
    def connect_small(self) -> Connect:
        """Connect to a store with room for `small_capacity_bytes`.

        Its puts wait 1 to 5 seconds for room.
        """
        raise NotImplementedError("define the fixture `connect_small`")

    @pytest.fixture
    def backend(self, connect: Connect) -> Iterator[Backend]:
        backend = connect()
        yield backend
        backend.close()

    @pytest.fixture
    def small(self, connect_small: Connect) -> Iterator[Backend]:
        backend = connect_small()
        yield backend
        backend.close()

    @pytest.fixture
    def prefix(self) -> str:
        return f"conformance/{uuid.uuid4().hex}"

    # Bytes in, bytes out

    def test_every_kind_of_buffer_comes_back_byte_for_byte(self, backend: Backend, prefix: str) -> None:
        numbers = np.arange(24, dtype="<i4").reshape(2, 3, 4)
        items = [
            (f"{prefix}/bytes", b"abc"),
            (f"{prefix}/bytearray", bytearray(b"defg")),
            (f"{prefix}/memoryview", memoryview(b"0123456789")[2:7]),
            (f"{prefix}/array", numbers),
            (f"{prefix}/empty", b""),
            (f"{prefix}/empty_array", np.empty((0, 4), np.int32)),
        ]
        backend.put_batch(items)
        assert read(backend, [key for key, _ in items]) == [
            b"abc",
            b"defg",
            b"23456",
            numbers.tobytes(),
            b"",
            b"",
        ]
        backend.delete_batch([key for key, _ in items])

    def test_a_value_is_the_stores_own_after_the_put(self, backend: Backend, prefix: str) -> None:
        value = bytearray(b"before")
        backend.put_batch([(f"{prefix}/a", value)])
        value[:] = b"after!"
        assert read(backend, [f"{prefix}/a"]) == [b"before"]
        backend.delete_batch([f"{prefix}/a"])

    def test_a_big_value_comes_back_whole(self, backend: Backend, prefix: str) -> None:
        value = np.random.default_rng(0).integers(0, 256, self.big_value_bytes, np.uint8)
        backend.put_batch([(f"{prefix}/big", value)])
        with backend.get_batch([f"{prefix}/big"]) as lease:
            assert np.array_equal(np.frombuffer(lease.views[0], np.uint8), value)
        backend.delete_batch([f"{prefix}/big"])

    def test_values_come_in_the_order_asked(self, backend: Backend, prefix: str) -> None:
        keys = [f"{prefix}/{index}" for index in range(20)]
        backend.put_batch([(key, key.encode()) for key in keys])
        asked = [*reversed(keys)]
        assert read(backend, asked) == [key.encode() for key in asked]
        backend.delete_batch(keys)

    def test_another_client_reads_what_one_put(self, connect: Connect, prefix: str) -> None:
        with ExitStack() as cleanup:
            writer, reader = connect(), connect()
            cleanup.callback(writer.close)
            cleanup.callback(reader.close)
            writer.put_batch([(f"{prefix}/a", b"shared")])
            assert read(reader, [f"{prefix}/a"]) == [b"shared"]
            reader.delete_batch([f"{prefix}/a"])
            with pytest.raises(ObjectLostError):
                writer.get_batch([f"{prefix}/a"])

    # Puts

    def test_a_put_never_overwrites_and_leaves_nothing_of_its_batch(
        self, backend: Backend, prefix: str
    ) -> None:
        backend.put_batch([(f"{prefix}/taken", b"first")])
        with pytest.raises(KeyExistsError, match="taken"):
            backend.put_batch(
                [(f"{prefix}/new", b"x"), (f"{prefix}/taken", b"second"), (f"{prefix}/newer", b"y")]
            )
        assert keys_below(backend, prefix) == [f"{prefix}/taken"]
        assert read(backend, [f"{prefix}/taken"]) == [b"first"]
        backend.delete_batch([f"{prefix}/taken"])

    def test_one_key_twice_in_a_batch_is_refused_whole(self, backend: Backend, prefix: str) -> None:
        with pytest.raises(KeyExistsError):
            backend.put_batch([(f"{prefix}/a", b"x"), (f"{prefix}/b", b"y"), (f"{prefix}/a", b"z")])
        assert keys_below(backend, prefix) == []

    def test_of_two_writers_of_one_key_one_wins_whole(self, backend: Backend, prefix: str) -> None:
        values = [bytes([index]) * 100_000 for index in range(8)]
        together = threading.Barrier(len(values))

        def put(value: bytes) -> bool:
            together.wait()
            try:
                backend.put_batch([(f"{prefix}/contested", value)])
            except KeyExistsError:
                return False
            return True

        with ThreadPoolExecutor(len(values)) as pool:
            won = list(pool.map(put, values))
        assert won.count(True) == 1
        assert read(backend, [f"{prefix}/contested"]) == [values[won.index(True)]]
        backend.delete_batch([f"{prefix}/contested"])

    def test_a_key_can_be_put_again_after_its_delete(self, backend: Backend, prefix: str) -> None:
        for value in (b"one", b"two"):
            backend.put_batch([(f"{prefix}/a", value)])
            assert read(backend, [f"{prefix}/a"]) == [value]
            backend.delete_batch([f"{prefix}/a"])

    def test_a_part_of_an_object_is_read_into_memory_of_the_caller(
        self, backend: Backend, prefix: str
    ) -> None:
        value = bytes(range(256)) * 400
        backend.put_batch([(f"{prefix}/a", value)])
        for offset, num_bytes in ((0, 1), (70_000, 5_000), (len(value) - 3, 3), (0, len(value))):
            buffer = bytearray(num_bytes)
            backend.get_range_into(f"{prefix}/a", len(value), offset, memoryview(buffer))
            assert buffer == value[offset : offset + num_bytes]
        with pytest.raises(CorruptObjectError):
            backend.get_range_into(f"{prefix}/a", len(value) + 1, 0, memoryview(bytearray(1)))
        with pytest.raises(ObjectLostError):
            backend.get_range_into(f"{prefix}/absent", 1, 0, memoryview(bytearray(1)))

    # A full store

    def test_what_never_fits_is_refused_with_the_sizes_and_leaves_nothing(
        self, small: Backend, prefix: str
    ) -> None:
        size = 2 * self.small_capacity_bytes
        with pytest.raises(StoreFullError, match=str(size)):
            small.put_batch([(f"{prefix}/small", b"x"), (f"{prefix}/large", bytes(size - 1))])
        assert keys_below(small, prefix) == []
        small.put_batch([(f"{prefix}/fits", bytes(self.small_capacity_bytes // 4))])
        small.delete_batch([f"{prefix}/fits"])

    def test_a_full_store_refuses_after_waiting_and_keeps_what_it_holds(
        self, small: Backend, prefix: str
    ) -> None:
        keys = self._fill(small, prefix)
        with pytest.raises(StoreFullError):
            small.put_batch([(f"{prefix}/more", bytes(self.small_capacity_bytes // 2))])
        assert read(small, [keys[0]]) == [bytes(self.small_capacity_bytes // 4)]
        small.delete_batch(keys)

    def test_a_put_that_has_waited_elsewhere_waits_no_longer(self, small: Backend, prefix: str) -> None:
        small.put_batch([(f"{prefix}/fits", b"x")], waited_s=1e6)
        small.delete_batch([f"{prefix}/fits"])
        keys = self._fill(small, prefix)
        room = threading.Timer(0.3, small.delete_batch, [keys])
        room.start()
        try:
            with pytest.raises(StoreFullError):
                small.put_batch([(f"{prefix}/late", bytes(self.small_capacity_bytes // 4))], waited_s=1e6)
        finally:
            room.join()

    def test_a_put_waits_for_room_that_a_delete_makes(self, small: Backend, prefix: str) -> None:
        keys = self._fill(small, prefix)
        room = threading.Timer(0.3, small.delete_batch, [keys])
        room.start()
        try:
            small.put_batch([(f"{prefix}/waited", bytes(self.small_capacity_bytes // 4))])
        finally:
            room.join()
        assert keys_below(small, prefix) == [f"{prefix}/waited"]
        small.delete_batch([f"{prefix}/waited"])

    def _fill(self, backend: Backend, prefix: str) -> list[str]:
        """Put quarters of the room until one does not fit; the keys of those that did."""
        keys: list[str] = []
        for index in range(5):
            try:
                backend.put_batch([(f"{prefix}/fill{index}", bytes(self.small_capacity_bytes // 4))])
            except StoreFullError:
                break
            keys.append(f"{prefix}/fill{index}")
        assert 0 < len(keys) < 5, f"{len(keys)} quarters fitted into the small store"
        return keys

    # Leases

    def test_views_are_read_only(self, backend: Backend, prefix: str) -> None:
        backend.put_batch([(f"{prefix}/a", b"fixed")])
        with backend.get_batch([f"{prefix}/a"]) as lease:
            assert lease.views[0].readonly
            with pytest.raises(TypeError):
                lease.views[0][0] = 0
        backend.delete_batch([f"{prefix}/a"])

    def test_views_are_an_error_after_release_which_is_idempotent(
        self, backend: Backend, prefix: str
    ) -> None:
        backend.put_batch([(f"{prefix}/a", b"lent")])
        lease = backend.get_batch([f"{prefix}/a"])
        view = lease.views[0]
        lease.release()
        lease.release()
        with pytest.raises(ReleasedViewError):
            _ = lease.views
        with pytest.raises(ValueError, match="released"):
            bytes(view)
        backend.delete_batch([f"{prefix}/a"])

    def test_an_array_kept_after_release_never_sees_other_bytes(self, backend: Backend, prefix: str) -> None:
        backend.put_batch([(f"{prefix}/kept", b"\x01" * 50_000)])
        lease = backend.get_batch([f"{prefix}/kept"])
        kept = np.frombuffer(lease.views[0], np.uint8)
        lease.release()
        backend.delete_batch([f"{prefix}/kept"])
        for index in range(20):
            backend.put_batch([(f"{prefix}/{index}", b"\x02" * 50_000)])
            assert read(backend, [f"{prefix}/{index}"]) == [b"\x02" * 50_000]
        assert (kept == 1).all()
        backend.delete_batch([f"{prefix}/{index}" for index in range(20)])

    # Reads and deletes

    def test_absent_keys_are_named(self, backend: Backend, prefix: str) -> None:
        backend.put_batch([(f"{prefix}/here", b"x")])
        with pytest.raises(ObjectLostError, match="gone") as caught:
            backend.get_batch([f"{prefix}/here", f"{prefix}/gone"])
        assert f"{prefix}/here" not in str(caught.value)
        backend.delete_batch([f"{prefix}/here"])

    def test_reading_into_the_callers_buffers_fills_them_or_is_an_error(
        self, backend: Backend, prefix: str
    ) -> None:
        keys = [f"{prefix}/a", f"{prefix}/b"]
        backend.put_batch([(keys[0], b"12345"), (keys[1], b"x" * 70_000)])
        buffers = [memoryview(bytearray(5)), memoryview(bytearray(70_000))]
        backend.get_batch_into(keys, buffers)
        assert [bytes(buffer) for buffer in buffers] == [b"12345", b"x" * 70_000]
        for wrong in (4, 6):
            with pytest.raises(CorruptObjectError):
                backend.get_batch_into(keys[:1], [memoryview(bytearray(wrong))])
        with pytest.raises(ObjectLostError, match="gone"):
            backend.get_batch_into([f"{prefix}/gone"], [memoryview(bytearray(5))])
        backend.delete_batch(keys)

    def test_deleting_what_is_absent_counts_as_deleted(self, backend: Backend, prefix: str) -> None:
        backend.put_batch([(f"{prefix}/a", b"x")])
        backend.delete_batch([f"{prefix}/never", f"{prefix}/a"])
        backend.delete_batch([f"{prefix}/a"])
        assert keys_below(backend, prefix) == []

    def test_a_delete_is_forced_and_a_reader_keeps_its_views(self, backend: Backend, prefix: str) -> None:
        backend.put_batch([(f"{prefix}/a", b"still here")])
        with backend.get_batch([f"{prefix}/a"]) as lease:
            backend.delete_batch([f"{prefix}/a"])
            assert keys_below(backend, prefix) == []
            with pytest.raises(ObjectLostError):
                backend.get_batch([f"{prefix}/a"])
            assert bytes(lease.views[0]) == b"still here"

    # Lists and figures

    def test_list_tells_size_and_age_of_what_starts_with_the_prefix(
        self, backend: Backend, prefix: str
    ) -> None:
        before_s = time.time()
        backend.put_batch(
            [(f"{prefix}/run-1/a", b"12345"), (f"{prefix}/run-1/b", b""), (f"{prefix}/run-10/c", b"1")]
        )
        listed = {info.key: info for info in backend.list(f"{prefix}/run-1/")}
        assert {key: info.stored_bytes for key, info in listed.items()} == {
            f"{prefix}/run-1/a": 5,
            f"{prefix}/run-1/b": 0,
        }
        # Clocks of file systems and servers may be coarser than this process's.
        assert all(before_s - 2 <= info.created_s <= time.time() + 2 for info in listed.values())
        assert len(keys_below(backend, f"{prefix}/run-1")) == 3
        backend.delete_batch(keys_below(backend, prefix))

    def test_a_list_beside_puts_and_deletes_shows_whole_objects_and_what_stays(
        self, backend: Backend, prefix: str
    ) -> None:
        backend.put_batch([(f"{prefix}/stays", b"12345")])
        done = threading.Event()

        def come_and_go() -> None:
            for turn in range(20):
                keys = [f"{prefix}/{turn}/{part}" for part in range(3)]
                backend.put_batch([(key, b"x" * 7) for key in keys])
                backend.delete_batch(keys)
            done.set()

        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(come_and_go)
            while not done.is_set() and not coming.done():
                sizes = {info.key: info.stored_bytes for info in backend.list(f"{prefix}/")}
                assert sizes.pop(f"{prefix}/stays") == 5
                assert set(sizes.values()) <= {7}
                backend.stats()
            coming.result()
        backend.delete_batch([f"{prefix}/stays"])

    def test_stats_follow_puts_and_deletes(self, backend: Backend, prefix: str) -> None:
        before = backend.stats()
        backend.put_batch([(f"{prefix}/a", bytes(70_000)), (f"{prefix}/b", bytes(70_000))])
        during = backend.stats()
        assert during.objects == before.objects + 2
        assert during.used_bytes >= before.used_bytes + 140_000
        assert during.capacity_bytes is None or during.used_bytes <= during.capacity_bytes
        backend.delete_batch([f"{prefix}/a", f"{prefix}/b"])
        assert backend.stats().objects == before.objects

    # Threads, and the end

    def test_threads_do_not_disturb_each_other(self, backend: Backend, prefix: str) -> None:
        def work(worker: int) -> None:
            for turn in range(10):
                items = [
                    (f"{prefix}/{worker}/{turn}/{part}", bytes([worker, turn, part]) * 3000)
                    for part in range(3)
                ]
                backend.put_batch(items)
                assert read(backend, [key for key, _ in items]) == [value for _, value in items]
                backend.delete_batch([key for key, _ in items])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert keys_below(backend, prefix) == []

    def test_close_is_idempotent_final_and_keeps_the_objects(self, connect: Connect, prefix: str) -> None:
        first, second = connect(), connect()
        first.put_batch([(f"{prefix}/a", b"survives")])
        first.close()
        first.close()
        with pytest.raises(StoreUnavailableError):
            first.put_batch([(f"{prefix}/b", b"x")])
        with pytest.raises(StoreUnavailableError):
            first.get_batch([f"{prefix}/a"])
        assert read(second, [f"{prefix}/a"]) == [b"survives"]
        second.delete_batch([f"{prefix}/a"])
        second.close()

    def test_a_stash_goes_through_the_output_store(self, backend: Backend, prefix: str) -> None:
        store = OutputStore(backend, key_prefix=prefix)
        rows = np.arange(60, dtype=np.int32).reshape(5, 4, 3)
        stashes = [
            ConformanceStash(rows=rows),
            ConformanceStash(rows=rows[:0], scores=np.ones(3, np.float16)),
        ]
        refs = [StoreRef.from_builtins(ref.to_builtins()) for ref in store.put_many(stashes)]
        first, second = store.read_many(
            [(refs[0], ["rows"]), (refs[1], ["rows", "scores"])],
            stash_type=ConformanceStash,
            buffer_bytes=240,
        )
        assert first.rows is not None
        assert second.rows is not None
        assert second.scores is not None
        assert np.array_equal(first.rows, rows)
        assert first.scores is None
        assert second.rows.shape == (0, 4, 3)
        assert second.scores.dtype == np.float16
        store.delete_many(refs)
        assert keys_below(backend, prefix) == []


def read(backend: Backend, keys: Sequence[str]) -> list[bytes]:
    with backend.get_batch(keys) as lease:
        return [bytes(view) for view in lease.views]


def keys_below(backend: Backend, prefix: str) -> list[str]:
    return sorted(info.key for info in backend.list(prefix))
