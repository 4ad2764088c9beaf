"""`SharedMemoryBackend`: objects as files in a tmpfs, read through mappings."""

import contextlib
import errno
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Self

import numpy as np

from radix_transfer_plugins.backends.base import (
    Backend,
    BackendStats,
    Lease,
    ObjectInfo,
    require_length,
)
from radix_transfer_plugins.backends.lease import ViewLease
from radix_transfer_plugins.backends.shared_memory import layout
from radix_transfer_plugins.backends.shared_memory.config import SharedMemoryConfig, existing_spaces
from radix_transfer_plugins.backends.shared_memory.directory import PRIVATE_FLAGS
from radix_transfer_plugins.backends.shared_memory.space import Claim, Draft, Space, read_header
from radix_transfer_plugins.buffers import byte_view
from radix_transfer_plugins.codecs.base import Buffer
from radix_transfer_plugins.errors import (
    CorruptObjectError,
    KeyExistsError,
    ObjectLostError,
    OutputStoreError,
    StoreFullError,
    StoreUnavailableError,
)

# Below this, copying an object costs less than mapping and unmapping it.
_MIN_MAPPED_BYTES = 1 << 17
# Above this, a mapping is filled page by page as it is read.
_MAX_POPULATED_BYTES = 1 << 26
_MIN_SPARSE_BYTES = 1 << 28
_SPARSE_BLOCK_BYTES = 1 << 20
_KEYS_PER_LOCK = 256
_CLOSE_TIMEOUT_S = 60.0


class SharedMemoryBackend(Backend):
    """Backend of any number of processes of one user on one machine.

    A forked child may go on using its parent's backend. `stats` and `capacity_bytes` count payload bytes.
    Every object also takes its header and the rest of a page.
    """

    name: ClassVar[str] = "shared_memory"

    def __init__(self, config: SharedMemoryConfig) -> None:
        self.config = config
        self.key_prefix = config.key_prefix
        self.place = str(config.path.resolve())
        self._attach_lock = threading.Lock()
        self._closed = False
        self._calls: set[tuple[int, object]] = set()
        """Calls under way, with their process: a forked child inherits those of its parent's threads."""
        self._attached = (os.getpid(), Space(config.path))
        self._lent: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        """Mappings that views still hold."""

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        return cls(SharedMemoryConfig.parse(config))

    @classmethod
    def from_existing(cls, config: Mapping[str, object]) -> Self:
        parsed = SharedMemoryConfig.parse(config)
        if not parsed.path.is_dir():
            raise StoreUnavailableError(
                f"shared_memory: no store at {str(parsed.path)!r}; spaces on this machine: "
                f"{', '.join(existing_spaces()) or 'none'}"
            )
        return cls(parsed)

    @property
    def _space(self) -> Space:
        pid, space = self._attached
        if self._closed:
            raise StoreUnavailableError("shared_memory: this backend was closed; create a new one")
        # Locks and reservations belong to a process, so a forked child attaches itself.
        if pid != os.getpid():
            with self._attach_lock:
                if self._closed:
                    raise StoreUnavailableError("shared_memory: this backend was closed; create a new one")
                if self._attached[0] != os.getpid():
                    self._attached = (os.getpid(), Space(self.config.path))
                space = self._attached[1]
        return space

    @contextlib.contextmanager
    def _using(self) -> Iterator[Space]:
        """The space, whose descriptors `close` leaves alone inside the block."""
        call = (os.getpid(), object())
        # Before it is asked whether the backend is closed, while `close` first says so and then looks here.
        self._calls.add(call)
        try:
            yield self._space
        finally:
            self._calls.discard(call)

    def put_batch(self, items: Sequence[tuple[str, Buffer]], *, waited_s: float = 0.0) -> None:
        values = [(key, byte_view(value)) for key, value in items]
        keys = [key for key, _ in values]
        if len(set(keys)) != len(keys):
            raise KeyExistsError(f"shared_memory: a key occurs twice in one put: {sorted(keys)!r}")
        if not values:
            return
        # In one order for all writers, so that of two with a key in common one wins.
        values.sort(key=lambda item: item[0])
        num_bytes = sum(len(value) for _, value in values)
        deadline = time.monotonic() + self.config.wait_s - waited_s
        pause_s = 0.001
        first_try = True
        while not self._try_put(values, num_bytes, recount=first_try):
            if first_try:
                # With room, publishing tells: a put that must fail does not wait for room.
                for key in keys:
                    self._require_absent(key)
            # Counting takes the lock from those that delete, so a put that waits does it once.
            first_try = False
            capacity = self.config.capacity_bytes
            if time.monotonic() >= deadline or (capacity is not None and num_bytes > capacity):
                raise self._full(num_bytes)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)

    def get_batch(self, keys: Sequence[str]) -> Lease:
        views: list[memoryview] = []
        absent: list[str] = []
        for key in keys:
            file = self._open(key)
            if file is None:
                absent.append(key)
                continue
            try:
                views.append(_view(file, key, self._lent))
            finally:
                os.close(file)
        if absent:
            raise _lost(absent)
        return ViewLease(views)

    def get_batch_into(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> None:
        for key, buffer in zip(keys, buffers, strict=True):
            file = self._open(key)
            if file is None:
                raise _lost([key])
            try:
                _read_into(file, key, buffer, len(buffer))
            finally:
                os.close(file)

    def get_range_into(self, key: str, stored_bytes: int, offset: int, buffer: memoryview) -> None:
        file = self._open(key)
        if file is None:
            raise _lost([key])
        try:
            _read_into(file, key, buffer, stored_bytes, offset)
        finally:
            os.close(file)

    def delete_batch(self, keys: Sequence[str]) -> None:
        for first in range(0, len(keys), _KEYS_PER_LOCK):
            with self._using() as space:
                space.remove(keys[first : first + _KEYS_PER_LOCK])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._using() as space:
            space.reclaim()
            names = os.listdir(space.objects)
        name_prefix = layout.name_prefix(prefix)
        for name in names:
            if not name.startswith((name_prefix, "h-")):
                continue
            try:
                file = self._open_name(name)
            except CorruptObjectError:  # A symbolic link; it must not keep the others from being listed.
                continue
            if file is None:
                continue
            try:
                info = _info(file, name)
            finally:
                os.close(file)
            if info is not None and info.key.startswith(prefix):
                yield info

    def stats(self) -> BackendStats:
        with self._using() as space:
            space.settle()
            usage = space.usage
        lent_bytes = sum(len(mapping) for mapping in tuple(self._lent))
        return BackendStats(usage.objects, usage.used_bytes, self.config.capacity_bytes, lent_bytes)

    def close(self) -> None:
        """Waits for running calls; those that wait for room give up."""
        with self._attach_lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        while any(pid == os.getpid() for pid, _ in tuple(self._calls)):
            if time.monotonic() > deadline:
                raise StoreUnavailableError(
                    "shared_memory: calls still run in other threads; the backend was not closed"
                )
            time.sleep(0.001)
        self._attached[1].close()

    def _try_put(self, values: Sequence[tuple[str, memoryview]], num_bytes: int, *, recount: bool) -> bool:
        """False: no room now, and nothing of the attempt holds memory."""
        with self._using() as space:
            return self._write_and_publish(space, values, num_bytes, recount)

    def _write_and_publish(
        self, space: Space, values: Sequence[tuple[str, memoryview]], num_bytes: int, recount: bool
    ) -> bool:
        claim = Claim()
        drafts: list[Draft] = []
        try:
            # Asked first: filling a tmpfs to its last page takes memory that the whole machine shares.
            if num_bytes > _free_bytes(space) or not space.reserve(
                claim, num_bytes, self.config.capacity_bytes, recount=recount
            ):
                return False
            visibility = layout.VISIBLE if len(values) == 1 else layout.PENDING
            for key, value in values:
                file = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=space.objects)
                drafts.append(Draft(file, key))
                _write(
                    file,
                    layout.pack_header(layout.Header(visibility, len(value), time.time_ns(), key)),
                    value,
                )
            space.publish(drafts, claim)
        except BaseException as error:
            space.cancel(claim)
            if not isinstance(error, OSError) or isinstance(error, OutputStoreError):
                raise
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return False
            raise StoreUnavailableError(
                f"shared_memory: cannot write to {self.config.path}: {error.strerror}; if it was removed, "
                "create a new backend; if files are too many, raise `ulimit -n`"
            ) from error
        finally:
            for draft in drafts:
                os.close(draft.file)
        return True

    def _require_absent(self, key: str) -> None:
        with self._using() as space:
            try:
                os.stat(layout.object_name(key), dir_fd=space.objects, follow_symlinks=False)
            except FileNotFoundError:
                return
            space.settle()  # What a killed writer left of a batch is no object.
        if (file := self._open(key)) is not None:
            os.close(file)
            raise KeyExistsError(f"shared_memory: key {key!r} is taken; a put never overwrites")

    def _open(self, key: str) -> int | None:
        return self._open_name(layout.object_name(key))

    def _open_name(self, name: str) -> int | None:
        """A descriptor of a visible object that the caller closes, or None."""
        with self._using() as space:
            return _open_visible(space, name)

    def _full(self, num_bytes: int) -> StoreFullError:
        with self._using() as space:
            usage = space.usage
            disk = os.fstatvfs(space.objects)
            free_on_disk = _free_bytes(space)
        capacity = self.config.capacity_bytes
        if capacity is None:
            free, limit = free_on_disk, f"tmpfs of {disk.f_blocks * disk.f_frsize} bytes"
        else:
            free, limit = min(free_on_disk, max(0, capacity - usage.used_bytes)), f"capacity_bytes {capacity}"
        return StoreFullError(
            f"shared_memory: no room for {num_bytes} bytes after {self.config.wait_s:g} s: used "
            f"{usage.used_bytes} bytes in {usage.objects} objects, free {free}, {limit} "
            f"({self.config.path}). Delete what was read, run gc, or raise the limit"
        )


def _open_visible(space: Space, name: str) -> int | None:
    for _ in range(2):
        try:
            file = os.open(name, os.O_RDONLY | PRIVATE_FLAGS, dir_fd=space.objects)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CorruptObjectError(
                    f"shared_memory: {name!r} is a symbolic link, not an object"
                ) from error
            raise StoreUnavailableError(
                f"shared_memory: cannot open {name!r}: {error.strerror}; every view of {_MIN_MAPPED_BYTES} "
                "bytes and more holds a descriptor: release views earlier, or raise `ulimit -n`"
            ) from error
        visibility = os.pread(file, 8, layout.VISIBILITY_OFFSET)
        if visibility != layout.PENDING.to_bytes(8, "little"):
            return file
        os.close(file)
        space.settle()
    return None


def _free_bytes(space: Space) -> int:
    disk = os.fstatvfs(space.objects)
    return disk.f_bavail * disk.f_frsize


def _lost(keys: Sequence[str]) -> ObjectLostError:
    return ObjectLostError(
        f"shared_memory: not in the store: {', '.join(map(repr, keys))}; deleted, never put here, or put "
        "into another store than this one"
    )


def _write(file: int, head: bytes, value: memoryview) -> None:
    if len(value) >= _MIN_SPARSE_BYTES:
        os.write(file, head)
        _write_sparse(file, len(head), value)
        return
    written = os.writev(file, [head, value]) - len(head)
    while written < len(value):
        written += os.write(file, value[written:])


def _write_sparse(file: int, offset: int, value: memoryview) -> None:
    """Blocks of zeros become holes, which take no memory until they are read through a mapping."""
    os.ftruncate(file, offset + len(value))
    for start in range(0, len(value), _SPARSE_BLOCK_BYTES):
        block = value[start : start + _SPARSE_BLOCK_BYTES]
        if np.frombuffer(block, np.uint8).any():
            written = 0
            while written < len(block):
                written += os.pwrite(file, block[written:], offset + start + written)


def _info(file: int, name: str) -> ObjectInfo | None:
    """Describe an open object for a list.

    A damaged one is described by its file's name, so that it can be removed; None if no key of ours can name
    it with certainty.
    """
    try:
        header = read_header(file, name)
    except CorruptObjectError:
        key = layout.key_of_name(name)
        if key is None:
            return None
        status = os.fstat(file)
        return ObjectInfo(key, max(0, status.st_size - layout.payload_offset(key)), status.st_mtime)
    return ObjectInfo(header.key, header.payload_bytes, header.created_ns / 1e9)


def _view(file: int, key: str, lent: weakref.WeakSet[mmap.mmap]) -> memoryview:
    """Read-only bytes of the object: a mapping, noted in `lent`, or a copy if it is small or has holes."""
    offset = layout.payload_offset(key)
    status = os.fstat(file)
    file_bytes = status.st_size
    if file_bytes < _MIN_MAPPED_BYTES:
        data: bytes | mmap.mmap = os.pread(file, file_bytes, 0)
    else:
        try:
            if 512 * status.st_blocks < file_bytes:
                return _read_sparse(file, key, file_bytes)
            populate = mmap.MAP_POPULATE if file_bytes <= _MAX_POPULATED_BYTES else 0
            data = mmap.mmap(file, file_bytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED | populate)
            lent.add(data)
        except OSError as error:
            raise StoreUnavailableError(
                f"shared_memory: cannot map {key!r} ({file_bytes} bytes): {error.strerror}; release views "
                "earlier, or raise `ulimit -n`"
            ) from error
    layout.unpack_header(data[:offset], layout.object_name(key), file_bytes)
    return memoryview(data)[offset:]


def _read_sparse(file: int, key: str, file_bytes: int) -> memoryview:
    """The object in memory of this process, where holes take none.

    In a mapping of the file, every page of a hole that is read takes one of the tmpfs; where it has none
    left, the kernel kills the reader.
    """
    data = mmap.mmap(-1, file_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(data)
    end = 0
    while end < file_bytes:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # No data follows.
                break
            raise
        end = os.lseek(file, start, os.SEEK_HOLE)
        while start < end and (read := os.preadv(file, [view[start:end]], start)):
            start += read
    offset = layout.payload_offset(key)
    layout.unpack_header(data[:offset], layout.object_name(key), file_bytes)
    return view[offset:].toreadonly()


def _read_into(file: int, key: str, buffer: memoryview, stored_bytes: int, offset: int = 0) -> None:
    """Fill the buffer from `offset` on of the object, which must have `stored_bytes`."""
    head = os.pread(file, layout.payload_offset(key), 0)
    header = layout.unpack_header(head, layout.object_name(key), os.fstat(file).st_size)
    require_length(key, stored_bytes, header.payload_bytes)
    read = 0
    while read < len(buffer) and (more := os.preadv(file, [buffer[read:]], len(head) + offset + read)):
        read += more
