"""Replay outputs of samples as arrays: each stored (key, field) is read once a call, only the rows in use."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from radix_rl.errors import ReplayError
from radix_rl.rollout.refs import delete_refs
from radix_rl.rollout.replay_index import MASK_FIELDS, PER_TOKEN_FIELDS, Segment, StoreSegment
from radix_rl.rollout.sample import Sample, check_uniform
from radix_transfer_plugins import OutputStore, StoreRef, TokenOutputStash
from radix_transfer_plugins.errors import ObjectLostError, ReadBufferError

__all__ = ["assemble_replay", "delete_refs"]

FlatField = tuple[str, str]
"""(key of the ref, field name)."""

MISSING = -1


def assemble_replay(
    samples: Sequence[Sample],
    store: OutputStore | None,
    fields: Sequence[str],
    buffer_bytes: int,
    *,
    narrow: bool = False,
) -> list[dict[str, np.ndarray]]:
    """One dict a sample, of arrays the caller owns; a field that no sample has is in none of them.

    routed_experts, indexer_topk: `[N - 1, layers, top_k]` int32, -1 where a row is missing (injected tokens
    at the end). sampling_mask_lengths: `[C]` int32, 0 where a token was not sampled; the flat mask fields
    follow its order.

    With `narrow`, ids come in the smallest signed type that holds every id of their codec, such as int8 for
    up to 128 experts: a quarter of the memory.

    `buffer_bytes` bounds the stored bytes in flight. A segment that several samples share is read once.
    Raises ReplayError naming sample, field and key for a lost object, and for a field that only some
    samples have; the store's errors.
    """
    check_uniform(samples, fields)
    wanted = [field for field in fields if samples and field in samples[0].replay.segments]
    if "sampling_mask_lengths" not in wanted and any(field in MASK_FIELDS for field in wanted):
        raise ReplayError(
            f"the sampling mask needs sampling_mask_lengths among the fields, got {list(fields)!r}"
        )
    read = _read(samples, store, wanted, buffer_bytes, narrow)
    assembled: list[dict[str, np.ndarray]] = []
    for sample in samples:
        parts = {field: _parts(sample, field, read) for field in wanted}
        rows = {field: _per_token(sample, parts.pop(field)) for field in wanted if field in PER_TOKEN_FIELDS}
        assembled.append(rows | _mask(sample, parts))
    return assembled


class _Span:
    """Stored rows [start, end) of one (key, field) that this call reads."""

    def __init__(self) -> None:
        self.start, self.end = -1, -1

    def include(self, start: int, end: int) -> None:
        self.start = start if self.start < 0 else min(self.start, start)
        self.end = max(self.end, end)


class _Read:
    """Stored rows of one (key, field), until the last segment that uses them has taken them.

    So that a step's rows are not in memory twice, as they were read and as they were assembled.
    """

    def __init__(self, start_row: int, array: np.ndarray, num_uses: int) -> None:
        self._start_row = start_row
        self._array: np.ndarray | None = array
        self._has_one_user = num_uses == 1
        self._uses_left = num_uses

    def take(self, start: int, end: int) -> tuple[np.ndarray, bool]:
        """Rows [start, end), and whether they are the caller's alone."""
        assert self._array is not None
        rows = self._array[start - self._start_row : end - self._start_row]
        self._uses_left -= 1
        if self._uses_left == 0:
            self._array = None
        return rows, self._has_one_user


def _read(
    samples: Sequence[Sample],
    store: OutputStore | None,
    fields: Sequence[str],
    buffer_bytes: int,
    narrow: bool,
) -> dict[FlatField, _Read]:
    """What the samples' segments need of the store."""
    refs: dict[str, StoreRef] = {}
    uses: Counter[FlatField] = Counter()
    spans: dict[str, dict[str, _Span]] = {}
    for _, segment in _store_segments(samples, fields):
        key = segment.ref.key
        refs[key] = segment.ref
        start, end = _stored_rows(segment)
        uses[key, segment.field] += 1
        spans.setdefault(key, {}).setdefault(segment.field, _Span()).include(start, end)
    if not refs:
        return {}
    if store is None:
        raise ReplayError(
            "the samples' replay outputs are in the output store, but this trainer was given none"
        )
    requests = [
        (ref, list(spans[key]), {field: (span.start, span.end) for field, span in spans[key].items()})
        for key, ref in refs.items()
    ]
    try:
        stashes = store.read_many(
            requests, stash_type=TokenOutputStash, buffer_bytes=buffer_bytes, narrow=narrow
        )
    except ObjectLostError as error:
        raise ReplayError(_lost_message(samples, fields, error)) from error
    except ReadBufferError as error:
        raise ReplayError(f"{error}; raise output_store.read_buffer_bytes") from error
    return {
        (key, field): _Read(span.start, getattr(stash, field), uses[key, field])
        for key, stash in zip(refs, stashes, strict=True)
        for field, span in spans[key].items()
    }


def _store_segments(
    samples: Sequence[Sample], fields: Sequence[str]
) -> Iterator[tuple[Sample, StoreSegment]]:
    for sample in samples:
        for field in fields:
            for segment in sample.replay.segments[field]:
                if isinstance(segment, StoreSegment) and segment.end_row > segment.start_row:
                    yield sample, segment


def _stored_rows(segment: StoreSegment) -> tuple[int, int]:
    """Absolute rows of the stored array.

    The flat mask fields have no rows to choose from: all of their ids.
    """
    if segment.field in MASK_FIELDS and segment.field != "sampling_mask_lengths":
        return 0, segment.ref.fields[segment.field].shape[0]
    return segment.start_row - segment.origin_row, segment.end_row - segment.origin_row


def _lost_message(samples: Sequence[Sample], fields: Sequence[str], error: ObjectLostError) -> str:
    text = str(error)
    for sample, segment in _store_segments(samples, fields):
        key = segment.ref.field_key(segment.field)
        if key in text:
            return (
                f"sample {sample.name}: field {segment.field!r} is lost, the store no longer holds key "
                f"{key!r}; it was deleted by another reader or by garbage collection, the process that held "
                "it ended, or the engine writes to another store than this one: compare key_prefix and "
                "space of output_store.config with those of the server"
            )
    return f"stored replay outputs are lost: {text}"


class _Part(NamedTuple):
    segment: Segment
    array: np.ndarray
    """Exactly its rows; of flat mask fields at least its ids."""
    is_own: bool
    """Nobody else looks at the array's memory, so that it may be handed out."""


def _parts(sample: Sample, field: str, read: dict[FlatField, _Read]) -> list[_Part]:
    """The segments of a field with their rows."""
    parts: list[_Part] = []
    for segment in sample.replay.segments[field]:
        is_own = False
        if not isinstance(segment, StoreSegment):
            array = segment.array
            if field == "sampling_mask_lengths":
                array = array[: segment.end_row - segment.start_row]
        elif segment.end_row == segment.start_row:
            spec = segment.ref.fields[field]
            array = np.empty((0, *spec.shape[1:]), dtype=spec.dtype)
        else:
            array, is_own = read[segment.ref.key, field].take(*_stored_rows(segment))
        parts.append(_Part(segment, array, is_own))
    return parts


def _per_token(sample: Sample, parts: list[_Part]) -> np.ndarray:
    num_rows = len(sample.tokens) - 1
    first = parts[0]
    if len(parts) == 1 and first.is_own and first.segment.start_row == 0 and len(first.array) >= num_rows:
        return first.array[:num_rows]
    dtype = np.result_type(*(part.array.dtype for part in parts))
    rows = np.full((num_rows, *first.array.shape[1:]), MISSING, dtype=dtype)
    for segment, array, _ in parts:
        # The last token never feeds a prediction; its row is there when a sample has no output.
        end_row = min(segment.end_row, num_rows)
        rows[segment.start_row : end_row] = array[: end_row - segment.start_row]
    return rows


def _mask(sample: Sample, parts: dict[str, list[_Part]]) -> dict[str, np.ndarray]:
    """The sampling mask over the whole response, in CSR form."""
    if not parts:
        return {}
    num_outputs = len(sample.tokens) - sample.prompt_tokens
    lengths = np.zeros(num_outputs, dtype=np.int32)
    sizes: list[int] = []
    for segment, array, _ in parts["sampling_mask_lengths"]:
        sizes.append(int(array.sum()))
        lengths[segment.start_row - sample.prompt_tokens : segment.end_row - sample.prompt_tokens] = array
    mask = {"sampling_mask_lengths": lengths}
    for field, flat in parts.items():
        if field != "sampling_mask_lengths":
            cut = [part.array[:size] for part, size in zip(flat, sizes, strict=True)]
            mask[field] = cut[0] if len(flat) == 1 and flat[0].is_own else np.concatenate(cut)
    return mask
