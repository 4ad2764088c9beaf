"""`Space`: one process's hold on a directory of objects; names, accounting and recovery."""

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from radix_transfer_plugins.backends.shared_memory import layout
from radix_transfer_plugins.backends.shared_memory.directory import PRIVATE_FLAGS, open_private_directory
from radix_transfer_plugins.errors import (
    ConfigError,
    CorruptObjectError,
    KeyExistsError,
    OutputStoreError,
    StoreUnavailableError,
)

LOCK_TIMEOUT_S = 30.0
_USAGE_MAGIC = b"RADIXSU1"


class Usage(NamedTuple):
    journal: int
    used_bytes: int
    """Payload bytes of published objects and of puts under way."""
    objects: int


class Draft(NamedTuple):
    """An object that is written but has no name yet: if its process dies, the kernel frees it."""

    file: int
    key: str


class Claim:
    """Identity of one put's reservation: giving it back twice, or after the put, changes nothing."""


class Space:
    """The folder of one store, opened by one process.

    Safe for the threads of that process; a forked child needs a Space of its own. `close` frees the
    descriptors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread_lock = threading.Lock()
        self._claims: dict[Claim, int] = {}
        """Bytes reserved by puts of this process."""
        with contextlib.ExitStack() as files:
            root = open_private_directory(path)
            files.callback(os.close, root)
            self.objects = open_private_directory("objects", root)
            files.callback(os.close, self.objects)
            self._clients = open_private_directory("clients", root)
            files.callback(os.close, self._clients)
            self._require_unnamed_files()
            self._lock_file = os.open("lock", os.O_RDWR | os.O_CREAT | PRIVATE_FLAGS, 0o600, dir_fd=root)
            files.callback(os.close, self._lock_file)
            usage_file = os.open("usage", os.O_RDWR | os.O_CREAT | PRIVATE_FLAGS, 0o600, dir_fd=root)
            files.callback(os.close, usage_file)
            with self._flocked():
                self._attach_client(files)
                os.ftruncate(usage_file, layout.USAGE.size)
                self._usage = mmap.mmap(usage_file, layout.USAGE.size)
                files.callback(self._usage.close)
                self._check_version()
            self.reclaim()
            self._files = files.pop_all()
        _close_in_forked_children().add(self)

    def close(self) -> None:
        """Idempotent. Objects stay."""
        self._files.close()

    # Accounting.

    @property
    def usage(self) -> Usage:
        return Usage(*layout.USAGE.unpack(self._usage[:])[1:])

    def reserve(self, claim: Claim, num_bytes: int, capacity_bytes: int | None, *, recount: bool) -> bool:
        """Count `num_bytes` as used, if there is room; what dead processes hold is given back first.

        `recount`: look at every object before there is said to be none.
        """
        with self._locked(), self._recounted_if_cut_short():
            if capacity_bytes is not None and self.usage.used_bytes + num_bytes > capacity_bytes:
                if recount or self._remove_dead_clients()[1]:
                    self._recount()
                if self.usage.used_bytes + num_bytes > capacity_bytes:
                    return False
            # In this order, here and in `cancel`: a kill in between leaves a reservation to reclaim.
            self._claims[claim] = num_bytes
            self._write_reserved()
            self._set_usage(add_bytes=num_bytes)
        return True

    def cancel(self, claim: Claim) -> None:
        """Give a reservation back, if it is still held."""
        with self._locked(), self._recounted_if_cut_short():
            num_bytes = self._claims.pop(claim, 0)
            self._set_usage(add_bytes=-num_bytes)
            self._write_reserved()

    # Names.

    def publish(self, drafts: Sequence[Draft], claim: Claim) -> None:
        """Give every draft its name, or none; turns the reservation into use. Raises KeyExistsError."""
        with self._locked(), self._changing():
            linked: list[str] = []
            try:
                for draft in drafts:
                    self._link(draft)
                    linked.append(layout.object_name(draft.key))
            except BaseException:
                for name in linked:
                    os.unlink(name, dir_fd=self.objects)
                raise
            if len(drafts) > 1:
                self._set_usage(journal=layout.COMMITTED)
                for draft in drafts:
                    os.pwrite(draft.file, layout.VISIBLE.to_bytes(8, "little"), layout.VISIBILITY_OFFSET)
            self._set_usage(add_objects=len(drafts))
            del self._claims[claim]
            self._write_reserved()

    def remove(self, keys: Sequence[str]) -> None:
        """Unlink; mappings of readers stay valid. Absent keys are no error."""
        with self._locked(), self._changing():
            for key in keys:
                name = layout.object_name(key)
                try:
                    file_bytes = os.stat(name, dir_fd=self.objects, follow_symlinks=False).st_size
                    os.unlink(name, dir_fd=self.objects)
                except FileNotFoundError:
                    continue
                payload_bytes = max(0, file_bytes - layout.payload_offset(key))
                self._set_usage(add_bytes=-payload_bytes, add_objects=-1)

    def settle(self) -> None:
        """Wait for a publish under way to end, or roll it forward or back if its process died."""
        with self._locked():
            pass

    def reclaim(self) -> None:
        """Give back what dead processes reserved."""
        with self._locked():
            if self._remove_dead_clients()[1]:
                self._recount()

    # Under the lock.

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._flocked():
            if self.usage.journal != layout.IDLE:
                self._recount()
            yield

    @contextlib.contextmanager
    def _flocked(self) -> Iterator[None]:
        with self._thread_lock:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            pause_s = 0.0002
            while True:
                try:
                    fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise StoreUnavailableError(
                            f"shared_memory: {self.path}/lock was held for {LOCK_TIMEOUT_S:.0f} s by another "
                            "process, which is stopped or stuck; `fuser` names it"
                        ) from error
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, 0.01)
            try:
                yield
            finally:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _link(self, draft: Draft) -> None:
        try:
            os.link(
                f"/proc/self/fd/{draft.file}",
                layout.object_name(draft.key),
                dst_dir_fd=self.objects,
                follow_symlinks=True,
            )
        except FileExistsError:
            raise KeyExistsError(
                f"shared_memory: key {draft.key!r} is taken; a put never overwrites"
            ) from None

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Whoever takes the lock after a kill or an interrupt in here counts again."""
        self._set_usage(journal=layout.CHANGING)
        try:
            yield
        except OutputStoreError:  # Raised on purpose, after all was undone.
            self._set_usage(journal=layout.IDLE)
            raise
        self._set_usage(journal=layout.IDLE)

    @contextlib.contextmanager
    def _recounted_if_cut_short(self) -> Iterator[None]:
        """Whoever takes the lock after an interrupt in here counts again."""
        try:
            yield
        except BaseException:
            self._set_usage(journal=layout.CHANGING)
            raise

    def _recount(self) -> None:
        """Finish or undo what a killed process was publishing, and count again; reads every header."""
        committed = self.usage.journal == layout.COMMITTED
        self._write_reserved()
        used_bytes = self._remove_dead_clients()[0] + sum(self._claims.values())
        objects = 0
        for name in os.listdir(self.objects):
            try:
                file = os.open(name, os.O_RDWR | PRIVATE_FLAGS, dir_fd=self.objects)
            except OSError as error:
                if error.errno == errno.ELOOP:  # A symbolic link is no object and takes no room.
                    continue
                raise
            try:
                header = read_header(file, name)
                if header.visibility == layout.PENDING and not committed:
                    os.unlink(name, dir_fd=self.objects)
                    continue
                if header.visibility == layout.PENDING:
                    os.pwrite(file, layout.VISIBLE.to_bytes(8, "little"), layout.VISIBILITY_OFFSET)
                used_bytes += header.payload_bytes
            except CorruptObjectError:
                used_bytes += os.fstat(file).st_size
            finally:
                os.close(file)
            objects += 1
        self._usage[:] = layout.USAGE.pack(_USAGE_MAGIC, layout.IDLE, used_bytes, objects)

    def _remove_dead_clients(self) -> tuple[int, int]:
        """Bytes that other living processes have reserved, and bytes that dead ones had."""
        alive_bytes = dead_bytes = 0
        for name in os.listdir(self._clients):
            if name == self._client_name:
                continue
            try:
                file = os.open(name, os.O_RDWR | PRIVATE_FLAGS, dir_fd=self._clients)
            except FileNotFoundError:  # It closed just now.
                continue
            try:
                (reserved,) = layout.RESERVED.unpack(os.pread(file, layout.RESERVED.size, 0).ljust(8, b"\0"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    alive_bytes += reserved
                else:
                    dead_bytes += reserved
                    if reserved and self.usage.journal == layout.IDLE:
                        # If this process is killed too, the next one knows that it must count.
                        self._set_usage(journal=layout.CHANGING)
                    os.unlink(name, dir_fd=self._clients)
            finally:
                os.close(file)
        return alive_bytes, dead_bytes

    def _set_usage(self, *, journal: int | None = None, add_bytes: int = 0, add_objects: int = 0) -> None:
        usage = self.usage
        self._usage[:] = layout.USAGE.pack(
            _USAGE_MAGIC,
            usage.journal if journal is None else journal,
            max(0, usage.used_bytes + add_bytes),
            max(0, usage.objects + add_objects),
        )

    def _write_reserved(self) -> None:
        """Tell other processes what this one has reserved."""
        self._client[:] = layout.RESERVED.pack(sum(self._claims.values()))

    # Attaching.

    def _attach_client(self, files: contextlib.ExitStack) -> None:
        self._client_name = secrets.token_hex(16)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | PRIVATE_FLAGS
        file = os.open(self._client_name, flags, 0o600, dir_fd=self._clients)
        files.callback(os.close, file)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.ftruncate(file, layout.RESERVED.size)
        self._client = mmap.mmap(file, layout.RESERVED.size)
        files.callback(self._client.close)
        files.callback(self._remove_own_client, os.getpid())

    def _remove_own_client(self, owner_pid: int) -> None:
        if os.getpid() == owner_pid:  # A forked child must not end its parent's claim.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._client_name, dir_fd=self._clients)

    def _check_version(self) -> None:
        magic = layout.USAGE.unpack(self._usage[:])[0]
        if magic == bytes(len(magic)):
            self._recount()  # Objects may be there though their accounting is new.
        elif magic != _USAGE_MAGIC:
            raise ConfigError(
                f"shared_memory: {self.path} was written by another version (its mark is {magic!r}, expected "
                f"{_USAGE_MAGIC!r}); stop its users and remove the directory, or choose another space"
            )

    def _require_unnamed_files(self) -> None:
        try:
            file = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=self.objects)
            try:
                os.stat(f"/proc/self/fd/{file}")
            finally:
                os.close(file)
        except OSError as error:
            raise ConfigError(
                f"shared_memory: {self.path} must lie on a tmpfs (with O_TMPFILE) and /proc must be mounted: "
                f"{error.strerror}"
            ) from error


@functools.cache
def _close_in_forked_children() -> "weakref.WeakSet[Space]":
    """Spaces whose descriptors a forked child closes at once.

    A lock on a file lasts until every process that inherited its descriptor has ended, so a child that
    outlives its killed parent would keep the parent's lock, and the parent's reservation alive.
    """
    spaces: weakref.WeakSet[Space] = weakref.WeakSet()

    def close_all() -> None:
        for space in list(spaces):
            space.close()

    os.register_at_fork(after_in_child=close_all)
    return spaces


def read_header(file: int, name: str) -> layout.Header:
    """Header of an open object file. Raises CorruptObjectError."""
    data = os.pread(file, 4096, 0)
    key_bytes = layout.key_bytes(data)
    if key_bytes > len(data) - layout.HEADER_BYTES:
        data += os.pread(file, key_bytes, len(data))
    return layout.unpack_header(data, name, os.fstat(file).st_size)
