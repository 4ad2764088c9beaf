"""What a batch of read requests needs from the backend, worked out before anything is read."""

import functools
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from radix_transfer_plugins.errors import FieldMissingError, ReadBufferError, RefError
from radix_transfer_plugins.keys import require_inside
from radix_transfer_plugins.ref import FieldSpec, StoreRef

RowRanges = Mapping[str, tuple[int, int]]
"""Field name -> absolute rows [start, end) wanted of it; a field not named is wanted whole."""

ReadRequest = tuple[StoreRef, Sequence[str]] | tuple[StoreRef, Sequence[str], RowRanges]


class Wanted(msgspec.Struct, frozen=True):
    """One array of the answer."""

    request: int
    """Index of the request."""
    field: str
    rows: tuple[int, int] | None
    """Rows counted from the stored array's row 0; None: all."""


class FieldRead(msgspec.Struct, frozen=True):
    """One stored object that is read once, and every array of the answer that comes from it."""

    key: str
    spec: FieldSpec
    wanted: list[Wanted]


def plan_reads(
    requests: Sequence[ReadRequest],
    stash_type: type[msgspec.Struct],
    *,
    backend: str,
    key_prefix: str,
    max_array_bytes: int | None,
) -> list[FieldRead]:
    """Objects to read in the order they are first asked for.

    Raises the errors of `OutputStore.read_many`; reads nothing.
    """
    members = _members(stash_type)
    reads: dict[str, FieldRead] = {}
    for index, request in enumerate(requests):
        ref, names = request[0], request[1]
        ranges = request[2] if len(request) > 2 else {}
        require_readable(ref, backend, key_prefix)
        _require_members(names, ranges, members, stash_type)
        for name in dict.fromkeys(names):
            spec = ref.fields.get(name)
            if spec is None:
                raise FieldMissingError(
                    f"the reference {ref.key!r} holds no field {name!r}; it holds: "
                    f"{', '.join(ref.fields) or 'none'}"
                )
            rows = _relative_rows(ref, name, spec, ranges[name]) if name in ranges else None
            _require_small(ref, name, spec, rows, max_array_bytes)
            read = reads.setdefault(ref.field_key(name), FieldRead(ref.field_key(name), spec, []))
            if read.spec != spec:
                raise RefError(f"two references describe the stored field {read.key!r} differently")
            read.wanted.append(Wanted(index, name, rows))
    return list(reads.values())


def require_readable(ref: StoreRef, backend: str, key_prefix: str) -> None:
    """Refuse a reference that this store may not read.

    Raises RefError for one of another backend, KeyOutsidePrefixError for a key outside `key_prefix`.
    """
    if not isinstance(ref, StoreRef):
        raise RefError(
            f"expected a StoreRef, got `{type(ref).__name__}`; parse it with StoreRef.from_builtins"
        )
    if ref.backend != backend:
        raise RefError(
            f"the reference {ref.key!r} is of backend {ref.backend!r}, this store is of {backend!r}"
        )
    require_inside(ref.key, key_prefix)


def split_chunks(reads: Sequence[FieldRead], buffer_bytes: int) -> Iterator[list[FieldRead]]:
    """The reads in order, in runs of at most `buffer_bytes` stored bytes, or of one larger read.

    The larger one can be read in pieces of rows. Raises ReadBufferError before the first for one that cannot.
    """
    for read in reads:
        if read.spec.stored_bytes <= buffer_bytes:
            continue
        row_bytes = read.spec.make_codec().row_bytes(read.spec.numpy_dtype, read.spec.shape)
        if row_bytes is None or row_bytes > buffer_bytes:
            least = read.spec.stored_bytes if row_bytes is None else row_bytes
            raise ReadBufferError(
                f"the field {read.key!r} is stored in {read.spec.stored_bytes} bytes, of which {least} are "
                f"read at once, more than buffer_bytes {buffer_bytes}"
            )
    return _chunks(reads, buffer_bytes)


def _chunks(reads: Sequence[FieldRead], buffer_bytes: int) -> Iterator[list[FieldRead]]:
    chunk: list[FieldRead] = []
    chunk_bytes = 0
    for read in reads:
        if chunk and chunk_bytes + read.spec.stored_bytes > buffer_bytes:
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append(read)
        chunk_bytes += read.spec.stored_bytes
    if chunk:
        yield chunk


@functools.lru_cache(maxsize=256)
def _members(stash_type: type[msgspec.Struct]) -> dict[str, bool]:
    """Field name -> whether it has no default. Cached: msgspec resolves annotations anew each time."""
    return {field.name: field.required for field in msgspec.structs.fields(stash_type)}


def _require_members(
    names: Sequence[str], ranges: RowRanges, members: Mapping[str, bool], stash_type: type[msgspec.Struct]
) -> None:
    if isinstance(names, str):
        raise FieldMissingError(f"expected a sequence of field names, got the text {names!r}")
    unknown = [name for name in (*names, *ranges) if name not in members]
    if unknown:
        raise FieldMissingError(
            f"{stash_type.__name__} has no field {unknown[0]!r}; it has: {', '.join(members)}"
        )
    not_read = [name for name in ranges if name not in names]
    if not_read:
        raise FieldMissingError(f"rows are given for the field {not_read[0]!r}, which is not asked for")
    missing = [name for name, required in members.items() if required and name not in names]
    if missing:
        raise FieldMissingError(
            f"{stash_type.__name__} cannot be made without its field {missing[0]!r}; ask for it too"
        )


def _relative_rows(ref: StoreRef, name: str, spec: FieldSpec, rows: tuple[int, int]) -> tuple[int, int]:
    start, end = rows
    if not (spec.shape and spec.start_row <= start <= end <= spec.end_row):
        raise RefError(
            f"field {name!r} of {ref.key!r} holds the rows [{spec.start_row}, {spec.end_row}), asked for "
            f"[{start}, {end})"
        )
    return start - spec.start_row, end - spec.start_row


def _require_small(
    ref: StoreRef, name: str, spec: FieldSpec, rows: tuple[int, int] | None, max_array_bytes: int | None
) -> None:
    if max_array_bytes is None:
        return
    array_bytes = (
        spec.array_bytes if rows is None else spec.array_bytes // max(spec.shape[0], 1) * (rows[1] - rows[0])
    )
    if array_bytes > max_array_bytes:
        raise RefError(
            f"field {name!r} of {ref.key!r} would take {array_bytes} bytes, more than max_array_bytes "
            f"{max_array_bytes}; ask for fewer rows, or raise it if the writer is trusted"
        )
