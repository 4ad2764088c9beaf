"""`OutputStore`: stashes in, references out; references in, stashes back."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import numpy as np

from radix_transfer_plugins.backends.base import Backend, ObjectInfo
from radix_transfer_plugins.buffers import Checksum, byte_view, checksum_of
from radix_transfer_plugins.codecs.base import Codec
from radix_transfer_plugins.codecs.raw import RawCodec
from radix_transfer_plugins.errors import (
    CodecError,
    ConfigError,
    CorruptObjectError,
    OutputStoreError,
    RefError,
)
from radix_transfer_plugins.huge_pages import new_array
from radix_transfer_plugins.keys import KeySource, check_prefix, is_field_name
from radix_transfer_plugins.read_plan import (
    FieldRead,
    ReadRequest,
    RowRanges,
    plan_reads,
    require_readable,
    split_chunks,
)
from radix_transfer_plugins.ref import DTYPES, FieldSpec, StoreRef
from radix_transfer_plugins.views import LentArray, Loan, ReleasedView

__all__ = ["OutputStore", "ReadRequest", "RowRanges", "StoreStats"]

logger = logging.getLogger(__name__)

StashT = TypeVar("StashT", bound=msgspec.Struct)

DEFAULT_MAX_ARRAY_BYTES = 64 << 30
"""A whole indexer field of 128k tokens is below it, what a few forged bytes may claim is far above."""

_SHARED_CALL_BYTES, _SHARED_CALL_FIELDS = 1 << 20, 64
"""Encoded stashes go to the backend together until they have so many bytes or fields: a backend may hold a
file open for each.
"""

_DTYPE_NAMES = {np.dtype(name): name for name in DTYPES}
"""numpy takes longer to put a name together than to copy a small array."""


class StoreStats(msgspec.Struct, kw_only=True):
    """What one OutputStore has done so far. An object is one stored field, bytes are stored bytes."""

    objects_put: int = 0
    bytes_put: int = 0
    put_s: float = 0.0
    """Seconds inside put_many, summed over threads."""
    objects_read: int = 0
    bytes_read: int = 0
    read_s: float = 0.0
    """Seconds reading and decoding, without what the caller does inside a `get_many` block."""
    objects_deleted: int = 0
    """Keys handed to the backend for deletion, absent ones included."""
    delete_s: float = 0.0


class OutputStore:
    """One client of one backend. Safe to call from several threads.

    `key_prefix` (default: the backend's) confines the store: keys are created below it, and a reference
    outside it is neither read nor deleted. `codecs` maps field names to codecs for writing (default: raw);
    readers need none, since a reference names its own. `max_array_bytes` bounds the decoded size of a single
    array that a reference can make this store allocate (None: no bound); a larger one is a RefError before
    anything is read. A few stored bytes can stand for terabytes, so set it to what the reader can afford.
    """

    def __init__(
        self,
        backend: Backend,
        key_prefix: str | None = None,
        codecs: Mapping[str, Codec] | None = None,
        max_array_bytes: int | None = DEFAULT_MAX_ARRAY_BYTES,
    ) -> None:
        self.backend = backend
        self.key_prefix = check_prefix(backend.key_prefix if key_prefix is None else key_prefix)
        self._codecs = dict(codecs or {})
        self._raw = RawCodec()
        self._max_array_bytes = max_array_bytes
        self._keys = KeySource(self.key_prefix)
        self._stats = StoreStats()
        self._stats_lock = threading.Lock()
        wrong = [name for name, codec in self._codecs.items() if not isinstance(codec, Codec)]
        if wrong:
            raise ConfigError(f"codecs: expected a Codec for {wrong[0]!r}, got {self._codecs[wrong[0]]!r}")

    def put_many(
        self,
        stashes: Sequence[msgspec.Struct],
        *,
        start_rows: Sequence[Mapping[str, int]] | None = None,
        waited_s: float = 0.0,
    ) -> list[StoreRef]:
        """Store the stashes, all or nothing for the whole list; None fields are not stored.

        A stash goes to the backend in one call, small ones in one call together. `start_rows[i]` gives the
        absolute first row of fields of stash i (default 0). `waited_s`, which these stashes spent in a queue,
        counts as waiting for room, and so does the time of the call itself. When this returns, the data can
        be read by every client of the store. The arrays may be changed afterwards. Raises CodecError,
        StoreFullError, StoreUnavailableError; then nothing of the list is left in the store.
        """
        if start_rows is not None and len(start_rows) != len(stashes):
            raise ConfigError(
                f"start_rows: expected {len(stashes)} entries, one for each stash, got {len(start_rows)}"
            )
        began = time.perf_counter()
        refs: list[StoreRef] = []
        try:
            for group, items in self._encoded(stashes, start_rows):
                # Before their put: an interrupt right after it must find the references, and deleting absent
                # keys is harmless.
                refs += group
                try:
                    if items:
                        self.backend.put_batch(items, waited_s=waited_s + time.perf_counter() - began)
                except OutputStoreError:
                    del refs[-len(group) :]
                    raise
        except BaseException as error:
            self._undo(refs, error)
            raise
        self._count(
            objects_put=sum(len(ref.fields) for ref in refs),
            bytes_put=sum(spec.stored_bytes for ref in refs for spec in ref.fields.values()),
            put_s=time.perf_counter() - began,
        )
        return refs

    @contextmanager
    def get_many(
        self, requests: Sequence[ReadRequest], *, stash_type: type[StashT]
    ) -> Iterator[list[StashT]]:
        """Read-only views over the backend's buffers, valid inside the `with` block only.

        Afterwards the arrays raise ReleasedViewError; see docs/store.md for what is promised to code that
        holds on to bare buffers. Requests for the same field share one array. Raises what `read_many` raises.
        """
        began = time.perf_counter()
        reads = self._plan(requests, stash_type)
        loan = Loan()
        with self.backend.get_batch([read.key for read in reads]) as lease:
            arrays = _lend(reads, lease.views, len(requests), loan)
            self._count_reads(reads, began)
            stashes = [stash_type(**fields) for fields in arrays]
            try:
                yield stashes
            finally:
                # Before the lease ends, so that the last views of its memory are gone when it does.
                loan.ended = True
                for stash, fields in zip(stashes, arrays, strict=True):
                    for name in list(fields):
                        msgspec.structs.force_setattr(stash, name, ReleasedView())
                        del fields[name]

    def read_many(
        self,
        requests: Sequence[ReadRequest],
        *,
        stash_type: type[StashT],
        buffer_bytes: int,
        narrow: bool = False,
    ) -> list[StashT]:
        """Copies that the caller owns, in chunks of at most `buffer_bytes` stored bytes; see docs/store.md.

        Before anything is read: FieldMissingError for a field that the reference or `stash_type` lacks,
        ReadBufferError for a field that `buffer_bytes` holds neither whole nor in rows, RefError for rows
        that are not there or a reference of another backend, KeyOutsidePrefixError. While reading:
        ObjectLostError, CorruptObjectError, StoreUnavailableError. Fields not asked for keep the default of
        `stash_type`.

        With `narrow`, arrays of ids come in the smallest type that holds every id of their codec, such as
        int8 for up to 128 experts, in place of the type that they were put in.
        """
        began = time.perf_counter()
        reads = self._plan(requests, stash_type)
        arrays: list[dict[str, np.ndarray]] = [{} for _ in requests]
        for chunk in split_chunks(reads, buffer_bytes):
            if chunk[0].spec.stored_bytes > buffer_bytes:
                _read_in_pieces(self.backend, chunk[0], buffer_bytes, arrays, narrow)
                continue
            if self.backend.reads_into_memory:
                _copy_out(chunk, _read_into_memory(self.backend, chunk), arrays, narrow)
                continue
            with self.backend.get_batch([read.key for read in chunk]) as lease:
                _copy_out(chunk, lease.views, arrays, narrow)
        self._count_reads(reads, began)
        return [stash_type(**fields) for fields in arrays]

    def delete_many(self, refs: Sequence[StoreRef]) -> None:
        """Delete the objects; absent ones count as deleted.

        A reference that this store may not touch is left alone, and does not keep the others from being
        deleted: afterwards its error is raised, RefError or KeyOutsidePrefixError.
        """
        refused: list[RefError] = []
        keys: list[str] = []
        for ref in refs:
            try:
                require_readable(ref, self.backend.name, self.key_prefix)
            except RefError as error:
                refused.append(error)
            else:
                keys += [ref.field_key(name) for name in ref.fields]
        self._delete(keys)
        if refused:
            raise type(refused[0])(
                f"{len(refused)} of {len(refs)} references were not deleted, the others were: {refused[0]}"
            ) from refused[0]

    def list_objects(self, *, older_than_s: float = 0.0) -> Iterator[ObjectInfo]:
        """Objects below the key prefix."""
        newest = time.time() - older_than_s
        for info in self.backend.list(self.key_prefix + "/"):
            if older_than_s <= 0 or info.created_s <= newest:
                yield info

    def delete_objects(self, *, older_than_s: float) -> int:
        """Remove what crashed writers and readers left behind; the number of keys removed."""
        keys = [info.key for info in self.list_objects(older_than_s=older_than_s)]
        self._delete(keys)
        return len(keys)

    def stats(self) -> StoreStats:
        """A snapshot of the counters."""
        with self._stats_lock:
            return msgspec.structs.replace(self._stats)

    def close(self) -> None:
        """Close the backend; stored objects stay. Idempotent."""
        self.backend.close()

    def _encoded(
        self, stashes: Sequence[msgspec.Struct], start_rows: Sequence[Mapping[str, int]] | None
    ) -> Iterator[tuple[list[StoreRef], list[tuple[str, memoryview]]]]:
        """References and items of one backend call after the other."""
        refs: list[StoreRef] = []
        items: list[tuple[str, memoryview]] = []
        num_bytes = 0
        for index, stash in enumerate(stashes):
            ref, encoded = self._encode_stash(stash, start_rows[index] if start_rows else {})
            refs.append(ref)
            items += encoded
            num_bytes += sum(len(data) for _, data in encoded)
            full = num_bytes >= _SHARED_CALL_BYTES or len(items) >= _SHARED_CALL_FIELDS
            if full or index + 1 == len(stashes):
                yield refs, items
                refs, items, num_bytes = [], [], 0

    def _encode_stash(
        self, stash: msgspec.Struct, start_rows: Mapping[str, int]
    ) -> tuple[StoreRef, list[tuple[str, memoryview]]]:
        """Its reference, and what is to be stored under which keys."""
        arrays = _arrays_of(stash)
        unknown = [name for name in start_rows if name not in arrays]
        if unknown:
            raise ConfigError(
                f"start_rows: {type(stash).__name__} has no field {unknown[0]!r}; it has {', '.join(arrays)}"
            )
        key = self._keys.next()
        specs: dict[str, FieldSpec] = {}
        items: list[tuple[str, memoryview]] = []
        for name, array in arrays.items():
            if array is not None:
                specs[name], data = self._encode(name, array, start_rows.get(name, 0))
                items.append((f"{key}/{name}", data))
        return StoreRef(backend=self.backend.name, key=key, fields=specs), items

    def _encode(self, name: str, array: np.ndarray, start_row: int) -> tuple[FieldSpec, memoryview]:
        codec = self._codecs.get(name, self._raw)
        if not isinstance(start_row, int) or isinstance(start_row, bool) or start_row < 0:
            raise ConfigError(f"start_rows: expected a row >= 0 for the field {name!r}, got {start_row!r}")
        try:
            data = byte_view(codec.encode(array, start_row))
            spec = FieldSpec(
                dtype=_DTYPE_NAMES.get(array.dtype) or array.dtype.name,
                shape=array.shape,
                codec=codec.name,
                codec_config=codec.get_config(),
                stored_bytes=data.nbytes,
                start_row=start_row,
                checksum=checksum_of(data),
            )
        except (CodecError, RefError) as error:  # RefError: what no reference can describe.
            raise CodecError(f"field {name!r}: {error}") from error
        return spec, data

    def _undo(self, refs: Sequence[StoreRef], error: BaseException) -> None:
        """Delete what a failed put_many stored.

        A failure of that is told beside the first error, not instead of it.
        """
        try:
            self.delete_many(refs)
        except OutputStoreError as left:
            keys = ", ".join(ref.key for ref in refs)
            logger.warning("could not remove the objects of a failed put (%s): %s", keys, left)
            error.add_note(f"objects that could not be removed: {keys} ({left})")

    def _plan(self, requests: Sequence[ReadRequest], stash_type: type[msgspec.Struct]) -> list[FieldRead]:
        return plan_reads(
            requests,
            stash_type,
            backend=self.backend.name,
            key_prefix=self.key_prefix,
            max_array_bytes=self._max_array_bytes,
        )

    def _delete(self, keys: list[str]) -> None:
        began = time.perf_counter()
        if keys:
            self.backend.delete_batch(keys)
        self._count(objects_deleted=len(keys), delete_s=time.perf_counter() - began)

    def _count_reads(self, reads: Sequence[FieldRead], began: float) -> None:
        self._count(
            objects_read=len(reads),
            bytes_read=sum(read.spec.stored_bytes for read in reads),
            read_s=time.perf_counter() - began,
        )

    def _count(self, **increments: float) -> None:
        with self._stats_lock:
            for name, increment in increments.items():
                setattr(self._stats, name, getattr(self._stats, name) + increment)


def _arrays_of(stash: msgspec.Struct) -> dict[str, np.ndarray | None]:
    if not isinstance(stash, msgspec.Struct):
        raise CodecError(f"expected a msgspec Struct of numpy arrays, got `{type(stash).__name__}`")
    arrays: dict[str, np.ndarray | None] = {}
    for name in stash.__struct_fields__:
        value = getattr(stash, name)
        if value is not None and not isinstance(value, np.ndarray):
            raise CodecError(f"field {name!r}: expected a numpy array or None, got `{type(value).__name__}`")
        if not is_field_name(name):
            raise CodecError(f"field {name!r}: expected a name of ASCII letters, digits and _")
        arrays[name] = value
    return arrays


def _lend(
    reads: Sequence[FieldRead], views: Sequence[memoryview], num_requests: int, loan: Loan
) -> list[dict[str, np.ndarray]]:
    """The arrays of each request, as views wherever the codec allows it."""
    arrays: list[dict[str, np.ndarray]] = [{} for _ in range(num_requests)]
    for read, view in zip(reads, views, strict=True):
        _verify(read, view)
        for wanted in read.wanted:
            arrays[wanted.request][wanted.field] = LentArray.over(_decode(read, view, wanted.rows), loan)
    return arrays


def _copy_out(
    reads: Sequence[FieldRead],
    views: Sequence[memoryview],
    arrays: Sequence[dict[str, np.ndarray]],
    narrow: bool,
) -> None:
    """Add to `arrays`, one dict a request, what the reads give. Nothing looks at `views` when this returns.

    A function of its own: a local variable left over in the caller would keep the lease's memory in use.
    """
    for read, view in zip(reads, views, strict=True):
        _verify(read, view)
        kept = False
        for wanted in read.wanted:
            array = _decode(read, view, wanted.rows, narrow)
            if _looks_at(array, view):
                # Memory that is the caller's already may become one array of the answer, whole, and only one.
                if array.flags.writeable and array.nbytes == view.nbytes and not kept:
                    kept = True
                else:
                    array = _copied(array)
            arrays[wanted.request][wanted.field] = array


def _read_in_pieces(
    backend: Backend,
    read: FieldRead,
    buffer_bytes: int,
    arrays: Sequence[dict[str, np.ndarray]],
    narrow: bool,
) -> None:
    """Add to `arrays` what a read of more than `buffer_bytes` gives, some rows at a time."""
    spec, codec = read.spec, read.spec.make_codec()
    dtype = codec.narrowest(spec.numpy_dtype) if narrow else spec.numpy_dtype
    row_bytes = codec.row_bytes(spec.numpy_dtype, spec.shape)
    assert row_bytes is not None
    step = buffer_bytes // row_bytes
    targets = [(wanted, *(wanted.rows or (0, spec.shape[0]))) for wanted in read.wanted]
    try:
        for wanted, start, end in targets:
            arrays[wanted.request][wanted.field] = new_array((end - start, *spec.shape[1:]), dtype)
    except MemoryError as error:
        raise _over_memory(read) from error
    buffer = new_array((step * row_bytes,), np.dtype(np.uint8)).data
    checksum = Checksum()
    for first in range(0, spec.shape[0], step):
        last = min(first + step, spec.shape[0])
        piece = buffer[: (last - first) * row_bytes]
        backend.get_range_into(read.key, spec.stored_bytes, first * row_bytes, piece)
        checksum.add(piece)
        shape = (last - first, *spec.shape[1:])
        piece_spec = msgspec.structs.replace(
            spec, shape=shape, start_row=spec.start_row + first, stored_bytes=len(piece)
        )
        rows = _decode(FieldRead(read.key, piece_spec, []), piece, None, narrow)
        for wanted, start, end in targets:
            low, high = max(first, start), min(last, end)
            if low < high:
                target = arrays[wanted.request][wanted.field]
                target[low - start : high - start] = rows[low - first : high - first]
    _require_checksum(read, str(checksum))


def _read_into_memory(backend: Backend, reads: Sequence[FieldRead]) -> list[memoryview]:
    """The stored bytes of each read in memory of its own, which an array that looks at all of it may keep."""
    views = [new_array((read.spec.stored_bytes,), np.dtype(np.uint8)).data for read in reads]
    backend.get_batch_into([read.key for read in reads], views)
    return views


def _verify(read: FieldRead, view: memoryview) -> None:
    if view.nbytes != read.spec.stored_bytes:
        raise CorruptObjectError(
            f"the stored field {read.key!r} has {view.nbytes} bytes, its reference says "
            f"{read.spec.stored_bytes}"
        )
    _require_checksum(read, checksum_of(view))


def _require_checksum(read: FieldRead, found: str) -> None:
    if found != read.spec.checksum:
        raise CorruptObjectError(
            f"the stored field {read.key!r} has the checksum {found}, its reference {read.spec.checksum}"
        )


def _decode(
    read: FieldRead, view: memoryview, rows: tuple[int, int] | None, narrow: bool = False
) -> np.ndarray:
    spec = read.spec
    codec = spec.make_codec()
    dtype = codec.narrowest(spec.numpy_dtype) if narrow else spec.numpy_dtype
    by_codec = rows if codec.row_addressable else None
    try:
        array = codec.decode(view, dtype, spec.shape, spec.start_row, by_codec)
    except CorruptObjectError as error:
        raise CorruptObjectError(f"the stored field {read.key!r}: {error}") from error
    except MemoryError as error:
        raise _over_memory(read) from error
    return array if by_codec == rows or rows is None else array[rows[0] : rows[1]]


def _over_memory(read: FieldRead) -> RefError:
    return RefError(
        f"the field {read.key!r} has {read.spec.array_bytes} bytes when decoded, more than there is memory "
        "for; ask for fewer rows, or refuse such references with a lower max_array_bytes"
    )


def _looks_at(array: np.ndarray, view: memoryview) -> bool:
    # A codec's own read-only array counts too: the caller gets writable ones.
    return not array.flags.writeable or np.may_share_memory(array, np.frombuffer(view, np.uint8))


def _copied(array: np.ndarray) -> np.ndarray:
    copied = new_array(array.shape, array.dtype)
    np.copyto(copied, array)
    return copied
