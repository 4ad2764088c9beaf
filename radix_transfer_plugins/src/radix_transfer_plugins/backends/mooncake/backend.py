"""`MooncakeBackend`: hard-pinned objects in the memory of many machines."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from radix_transfer_plugins.backends.base import Backend, BackendStats, Lease, ObjectInfo
from radix_transfer_plugins.backends.lease import ViewLease
from radix_transfer_plugins.backends.mooncake import status
from radix_transfer_plugins.backends.mooncake.client import Client
from radix_transfer_plugins.backends.mooncake.config import MooncakeConfig
from radix_transfer_plugins.backends.mooncake.gate import LocalBufferGate
from radix_transfer_plugins.backends.mooncake.master_http import Capacity, MasterHttp
from radix_transfer_plugins.backends.mooncake.stored import TRAILER_BYTES, Trailer, original_key, stored_key
from radix_transfer_plugins.buffers import byte_view
from radix_transfer_plugins.codecs.base import Buffer
from radix_transfer_plugins.errors import (
    CorruptObjectError,
    KeyExistsError,
    ObjectLostError,
    ReadBufferError,
    StoreFullError,
    StoreUnavailableError,
)

logger = logging.getLogger(__name__)
# The TCP transport refuses transfers beyond a few thousand at once, as if the segment's process were gone.
_KEYS_PER_CALL = 256


class MooncakeBackend(Backend):
    """One native client, whose calls run without the GIL.

    A master that does not answer makes none of them wait longer than `timeout_s`.
    """

    name: ClassVar[str] = "mooncake"
    reads_into_memory: ClassVar[bool] = True

    def __init__(self, config: MooncakeConfig) -> None:
        self.config = config
        self.key_prefix = config.key_prefix
        self._client = Client(config)
        self._http = MasterHttp(config.metrics, config.timeout_s)
        self._gate = LocalBufferGate()
        self._left_lock = threading.Lock()
        self._left_behind: dict[str, Trailer] = {}
        """Stored keys that a failed put may have left because the master did not answer, removed as soon as
        it does.
        """

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        return cls(MooncakeConfig.parse(config))

    # Putting.

    def put_batch(self, items: Sequence[tuple[str, Buffer]], *, waited_s: float = 0.0) -> None:
        values = {stored_key(key): byte_view(value) for key, value in items}
        if len(values) != len(items):
            raise KeyExistsError(f"mooncake: a key occurs twice in one put: {[key for key, _ in items]!r}")
        if not values:
            return
        self._require_fits_buffer(values)
        self._remove_left_behind()
        self._require_absent(list(values))
        deadline = time.monotonic() + self.config.wait_s - waited_s
        pause_s = 0.01
        while (code := self._put_once(values)) == status.SEGMENTS_FULL:
            needed = sum(map(len, values.values()))
            capacity = self._capacity_if_known()
            if time.monotonic() >= deadline or (capacity and needed > capacity.capacity_bytes > 0):
                raise self._full(needed, capacity)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.25)
        if code == status.BUFFER_FULL:
            raise StoreFullError(
                f"mooncake: no room in the local buffer of {self.config.local_buffer_bytes} bytes for a put "
                f"of {max(map(len, values.values()))} bytes, alone and after a retry: unreleased views of "
                "reads hold it. Release them, or raise local_buffer_size"
            )
        if code != status.OK:
            raise status.unavailable(f"put of {len(values)} keys", code, self.config.master)

    def _put_once(self, values: Mapping[str, memoryview]) -> int:
        """Status; unless it is 0, nothing of the put is left.

        Raises KeyExistsError when another writer was faster.
        """
        trailer = Trailer.new()
        for group in _groups(values, self.config.local_buffer_bytes):
            code = self._put_group({key: values[key] for key in group}, trailer)
            if code in status.UNANSWERED:
                self._leave_behind(list(values), trailer, status.describe(code))
                return code
            if code != status.OK:
                self._remove_own(list(values), trailer)
                return code
        try:
            others = [key for key, found in self._trailers(list(values)).items() if found != trailer]
        except StoreUnavailableError as error:
            self._leave_behind(list(values), trailer, str(error))
            raise
        if others:
            self._remove_own(list(values), trailer)
            raise KeyExistsError(
                f"mooncake: another writer put {self._shown(others)} first; a put never overwrites"
            )
        return status.OK

    def _put_group(self, values: Mapping[str, memoryview], trailer: Trailer) -> int:
        packed = trailer.pack()
        stored = [b"".join((value, packed)) for value in values.values()]
        with self._client.native() as native:
            with self._gate.attempt():
                code = native.put_batch(list(values), stored, self._client.pinned)
            if code == status.BUFFER_FULL:
                with self._gate.retry():
                    code = native.put_batch(list(values), stored, self._client.pinned)
        return code

    def _require_fits_buffer(self, values: Mapping[str, memoryview]) -> None:
        limit = self.config.local_buffer_bytes
        for key, value in values.items():
            if len(value) + TRAILER_BYTES > limit:
                raise StoreFullError(
                    f"mooncake: {self._shown([key])} needs {len(value) + TRAILER_BYTES} bytes of the local "
                    f"buffer, which has {limit}; raise local_buffer_size"
                )

    def _require_absent(self, keys: Sequence[str]) -> None:
        with self._client.native() as native:
            found = native.batch_is_exist(list(keys))
        for key, code in zip(keys, found, strict=True):
            if code == 1:
                raise KeyExistsError(f"mooncake: key {self._shown([key])} is taken; a put never overwrites")
            if code != 0:
                raise status.unavailable("asking which keys exist", code, self.config.master)

    def _full(self, needed: int, capacity: Capacity | None) -> StoreFullError:
        if capacity is None:
            sizes = f"used and free bytes are unknown, since {self.config.metrics} does not answer"
        elif capacity.capacity_bytes == 0:
            sizes = "no process contributes memory; start one with a global_segment_size"
        else:
            used, total = capacity
            sizes = f"used {used}, free {total - used} (in pieces), capacity {total}"
        return StoreFullError(
            f"mooncake: no room in the segments for {needed} bytes after {self.config.wait_s:g} s: {sizes}. "
            "Delete what was read, run gc, or add segments"
        )

    def _capacity_if_known(self) -> Capacity | None:
        try:
            return self._http.capacity()
        except StoreUnavailableError as error:
            logger.debug("no capacity for the error message: %s", error)
            return None

    # Removing what must not stay.

    def _remove_own(self, keys: Sequence[str], trailer: Trailer) -> None:
        """Remove those of `keys` that carry this put's trailer.

        They are remembered if the master does not answer.
        """
        try:
            own = [key for key, found in self._trailers(keys).items() if found == trailer]
            self._remove(own)
        except StoreUnavailableError as error:
            self._leave_behind(keys, trailer, str(error))

    def _leave_behind(self, keys: Sequence[str], trailer: Trailer, reason: str) -> None:
        """Remember what a put may have left; the next call that the master answers removes it."""
        logger.warning("a failed put may have left %s, to be removed later: %s", self._shown(keys), reason)
        with self._left_lock:
            self._left_behind.update(dict.fromkeys(keys, trailer))

    def _remove_left_behind(self) -> None:
        with self._left_lock:
            left, self._left_behind = self._left_behind, {}
        for trailer in set(left.values()):
            self._remove_own([key for key, found in left.items() if found == trailer], trailer)

    def _remove(self, keys: Sequence[str]) -> None:
        for first in range(0, len(keys), _KEYS_PER_CALL):
            chunk = list(keys[first : first + _KEYS_PER_CALL])
            with self._client.native() as native:
                codes = native.batch_remove(chunk, True)
            for key, code in zip(chunk, codes, strict=True):
                if code not in (status.OK, status.NOT_FOUND):
                    raise status.unavailable(f"removal of {self._shown([key])}", code, self.config.master)

    def delete_batch(self, keys: Sequence[str]) -> None:
        self._remove([stored_key(key) for key in keys])
        self._remove_left_behind()

    # Reading.

    def get_batch(self, keys: Sequence[str]) -> Lease:
        stored = [stored_key(key) for key in keys]
        if not stored:
            return ViewLease([])
        with self._client.native() as native:
            with self._gate.attempt():
                handles = _get_buffers(native, stored)
            if any(handle is None for handle in handles):
                failed = [key for key, handle in zip(stored, handles, strict=True) if handle is None]
                del handles
                self._explain_failed(native, failed, stored)
                with self._gate.retry():
                    handles = _get_buffers(native, stored)
                if any(handle is None for handle in handles):
                    raise ReadBufferError(
                        f"mooncake: {len(stored)} objects do not fit what is free of the local buffer of "
                        f"{self.config.local_buffer_bytes} bytes: unreleased views hold the rest. Release "
                        "them first, read less at once, or raise local_buffer_size"
                    )
        return ViewLease([_payload(handle, key) for handle, key in zip(handles, keys, strict=True)])

    def get_batch_into(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> None:
        for first in range(0, len(keys), _KEYS_PER_CALL):
            chunk = slice(first, first + _KEYS_PER_CALL)
            self._read_into(keys[chunk], buffers[chunk])

    def _read_into(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> None:
        stored = [stored_key(key) for key in keys]
        trailers = memoryview(bytearray(len(stored) * TRAILER_BYTES))
        filled = [buffer for buffer in buffers if len(buffer)]
        with self._client.registered([trailers, *filled]) as pointers_of, self._client.native() as native:
            first_trailer, *filled_at = pointers_of
            at = iter(filled_at)
            pointers = [
                [*([next(at)] if len(buffer) else []), first_trailer + row * TRAILER_BYTES]
                for row, buffer in enumerate(buffers)
            ]
            sizes = [[*([len(buffer)] if len(buffer) else []), TRAILER_BYTES] for buffer in buffers]
            codes = native.batch_get_into_multi_buffers(stored, pointers, sizes)
            for key, buffer, code in zip(stored, buffers, codes, strict=True):
                if code != len(buffer) + TRAILER_BYTES:
                    self._explain_unread(native, key, len(buffer), code)
        for row, key in enumerate(keys):
            Trailer.unpack(trailers[row * TRAILER_BYTES : (row + 1) * TRAILER_BYTES], key)

    def _explain_unread(self, native: Any, key: str, expected_bytes: int, code: int) -> None:
        held = native.get_size(key)
        if held == status.NOT_FOUND:
            raise self._lost([key])
        if held >= 0 and held != expected_bytes + TRAILER_BYTES:
            raise CorruptObjectError(
                f"mooncake: object {self._shown([key])}: expected {expected_bytes} bytes, the store holds "
                f"{held - TRAILER_BYTES}"
            )
        raise status.unavailable(
            f"read of {self._shown([key])}", held if held < 0 else code, self.config.master
        )

    def _explain_failed(self, native: Any, failed: Sequence[str], asked: Sequence[str]) -> None:
        """Raise for every reason but a local buffer that others hold just now."""
        sizes = self._sizes(native, failed, "read of")
        lost = [key for key, size in sizes.items() if size == status.NOT_FOUND]
        if lost:
            raise self._lost(lost)
        for key, size in sizes.items():
            if size < 0:
                raise status.unavailable(f"read of {self._shown([key])}", size, self.config.master)
        # The trailer comes without the local buffer: if it cannot be read, neither can the rest.
        unread = [key for key, found in self._trailers(failed).items() if found is None]
        if unread:
            raise status.unavailable(
                f"read of {self._shown(unread)}", status.TRANSFER_FAILED, self.config.master
            )
        needed = sum(sizes[key] if key in sizes else native.get_size(key) for key in asked)
        if needed > self.config.local_buffer_bytes:
            raise ReadBufferError(
                f"mooncake: {len(asked)} objects of {needed} bytes together do not fit the local buffer of "
                f"{self.config.local_buffer_bytes} bytes; read fewer at once, use read_many, or raise "
                "local_buffer_size"
            )

    def _trailers(self, keys: Sequence[str]) -> dict[str, Trailer | None]:
        """Trailer of each stored key; None: absent, unreadable, or no object of this store."""
        found: dict[str, Trailer | None] = {}
        for first in range(0, len(keys), _KEYS_PER_CALL):
            found |= self._trailers_of_chunk(keys[first : first + _KEYS_PER_CALL])
        return found

    def _sizes(self, native: Any, keys: Sequence[str], operation: str) -> dict[str, int]:
        """Size or status of each stored key. Raises StoreUnavailableError at the first that is unanswered."""
        sizes: dict[str, int] = {}
        for key in keys:
            sizes[key] = native.get_size(key)
            if sizes[key] in status.UNANSWERED:
                raise status.unavailable(f"{operation} {self._shown([key])}", sizes[key], self.config.master)
        return sizes

    def _trailers_of_chunk(self, keys: Sequence[str]) -> dict[str, Trailer | None]:
        found: dict[str, Trailer | None] = dict.fromkeys(keys)
        buffer = memoryview(bytearray(len(keys) * TRAILER_BYTES))
        with self._client.registered([buffer]) as (pointer,), self._client.native() as native:
            sizes = list(self._sizes(native, keys, "reading back").values())
            there = [row for row, size in enumerate(sizes) if size >= TRAILER_BYTES]
            if not there:
                return found
            (codes,) = native.get_into_ranges(
                [pointer],
                [[keys[row] for row in there]],
                [[[row * TRAILER_BYTES] for row in there]],
                [[[sizes[row] - TRAILER_BYTES] for row in there]],
                [[[TRAILER_BYTES] for _ in there]],
            )
        for row, (code,) in zip(there, codes, strict=True):
            if code == TRAILER_BYTES:
                try:
                    data = buffer[row * TRAILER_BYTES : (row + 1) * TRAILER_BYTES]
                    found[keys[row]] = Trailer.unpack(data, keys[row])
                except CorruptObjectError:
                    continue
        return found

    # Looking.

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        wanted = stored_key(prefix)
        keys = [key for key in self._http.stored_keys() if key.startswith(wanted)]
        for first in range(0, len(keys), _KEYS_PER_CALL):
            chunk = keys[first : first + _KEYS_PER_CALL]
            trailers = self._trailers(chunk)
            with self._client.native() as native:
                sizes = self._sizes(native, chunk, "listing")
            for key, size in sizes.items():
                trailer = trailers[key]
                if trailer is not None and size >= TRAILER_BYTES:
                    yield ObjectInfo(original_key(key), size - TRAILER_BYTES, trailer.created_us / 1e6)

    def stats(self) -> BackendStats:
        """Of the whole cluster, whoever put it."""
        used_bytes, capacity_bytes = self._http.capacity()
        return BackendStats(self._http.num_keys(), used_bytes, capacity_bytes)

    def close(self) -> None:
        self._client.close()

    def _lost(self, keys: Sequence[str]) -> ObjectLostError:
        return ObjectLostError(
            f"mooncake: not in the store: {self._shown(keys)}; deleted, never put here but into "
            "another store, or its segment's process ended"
        )

    def _shown(self, keys: Sequence[str]) -> str:
        return ", ".join(repr(original_key(key)) for key in keys)


def _payload(handle: Any, key: str) -> memoryview:
    view = memoryview(handle).toreadonly()
    Trailer.unpack(view[-TRAILER_BYTES:], key)
    return view[:-TRAILER_BYTES]


def _get_buffers(native: Any, keys: Sequence[str]) -> list[Any]:
    handles: list[Any] = []
    for first in range(0, len(keys), _KEYS_PER_CALL):
        handles += native.batch_get_buffer(keys[first : first + _KEYS_PER_CALL])
    return handles


def _groups(values: Mapping[str, memoryview], limit_bytes: int) -> Iterator[list[str]]:
    """Keys in order, in groups that fit one call and whose stored bytes fit the local buffer."""
    group: list[str] = []
    group_bytes = 0
    for key, value in values.items():
        needed = len(value) + TRAILER_BYTES
        if group and (group_bytes + needed > limit_bytes or len(group) == _KEYS_PER_CALL):
            yield group
            group, group_bytes = [], 0
        group.append(key)
        group_bytes += needed
    if group:
        yield group
