"""`TokenOutputCollector`: the replay outputs of one request while it runs."""

from typing import TypeVar

import numpy as np

from radix_transfer_plugins import TokenOutputStash

_T = TypeVar("_T")
_FIRST_CAPACITY_ROWS = 64


class _GrowingArray:
    """Rows appended to one array that doubles when full.

    Rows once written are never changed or moved under a reader: `first` gives views, and growth copies to new
    memory.
    """

    def __init__(self, row_shape: tuple[int, ...], dtype: type[np.generic], capacity_rows: int) -> None:
        self.row_shape = row_shape
        self.dtype = np.dtype(dtype)
        self.num_rows = 0
        self._capacity_rows = max(capacity_rows, 1)
        self._array: np.ndarray | None = None

    def append(self, rows: np.ndarray) -> None:
        """`[n, *row_shape]`, any dtype that casts to the array's own without loss."""
        if not np.can_cast(rows.dtype, self.dtype, "safe"):
            raise ValueError(
                f"expected rows of dtype {self.dtype} or narrower, got {rows.dtype!r}; convert them first"
            )
        if rows.shape[1:] != self.row_shape:
            raise ValueError(
                f"expected rows of shape [n, {', '.join(map(str, self.row_shape))}], got {rows.shape!r}"
            )
        end = self.num_rows + len(rows)
        array = self._with_room_for(end)
        array[self.num_rows : end] = rows
        self.num_rows = end

    def first(self, num_rows: int) -> np.ndarray:
        """View of the first rows, C-contiguous, never changed by later appends."""
        return self._with_room_for(num_rows)[:num_rows]

    def _with_room_for(self, num_rows: int) -> np.ndarray:
        if self._array is not None and num_rows <= len(self._array):
            return self._array
        capacity = self._capacity_rows if self._array is None else 2 * len(self._array)
        grown = np.empty((max(capacity, num_rows), *self.row_shape), self.dtype)
        if self._array is not None:
            grown[: self.num_rows] = self._array[: self.num_rows]
        self._array = grown
        return grown


class _TokenRows:
    """Rows of one per-token field from `start_row` on."""

    def __init__(self, field: str, shape: tuple[int, int], start_row: int, capacity_rows: int) -> None:
        self.field = field
        self.start_row = start_row
        self.end_row = 0
        """Absolute row after the last one added, dropped rows included."""
        self._kept = _GrowingArray(tuple(shape), np.int32, capacity_rows)

    def add(self, rows: np.ndarray) -> None:
        self._kept.append(rows[max(self.start_row - self.end_row, 0) :])
        self.end_row += len(rows)

    def until(self, end_row: int) -> np.ndarray:
        if end_row > self.end_row:
            raise ValueError(
                f"{self.field}: {end_row} tokens went through the model, but only {self.end_row} rows were "
                "collected; rows are never padded, so the engine's capture lost some"
            )
        return self._kept.first(max(end_row - self.start_row, 0))


class TokenOutputCollector:
    """Grows by whole rows as forward passes finish; owned by the request, used by one thread at a time.

    What was asked for at construction is in the stash even with zero rows; what was not asked for is None.
    """

    def __init__(
        self,
        *,
        routed_experts_shape: tuple[int, int] | None = None,
        indexer_topk_shape: tuple[int, int] | None = None,
        sampling_mask: bool = False,
        sampling_mask_logprobs: bool = False,
        start_row: int = 0,
        expected_rows: int = 0,
    ) -> None:
        """`*_shape` is `(layers, top_k)`. Rows below `start_row` (absolute) are dropped as they are added.

        `expected_rows` (absolute, 0: unknown) sizes the first allocation; more rows than that are fine.
        """
        if start_row < 0:
            raise ValueError(f"start_row: expected 0 or more, got {start_row!r}")
        if sampling_mask_logprobs and not sampling_mask:
            raise ValueError("sampling_mask_logprobs needs sampling_mask=True")
        self._start_row = start_row
        capacity = max(expected_rows - start_row, 1) if expected_rows else _FIRST_CAPACITY_ROWS
        self._routed_experts = (
            _TokenRows("routed_experts", routed_experts_shape, start_row, capacity)
            if routed_experts_shape is not None
            else None
        )
        self._indexer_topk = (
            _TokenRows("indexer_topk", indexer_topk_shape, start_row, capacity)
            if indexer_topk_shape is not None
            else None
        )
        self._mask_lengths = _GrowingArray((), np.int32, _FIRST_CAPACITY_ROWS) if sampling_mask else None
        self._mask_token_ids = _GrowingArray((), np.int32, _FIRST_CAPACITY_ROWS) if sampling_mask else None
        self._mask_logprobs = (
            _GrowingArray((), np.float32, _FIRST_CAPACITY_ROWS) if sampling_mask_logprobs else None
        )

    def add_routed_experts(self, rows: np.ndarray) -> None:
        """`[n, layers, top_k]` int32 (or narrower), the next n rows; copied."""
        _asked_for(self._routed_experts, "routed_experts").add(rows)

    def add_indexer_topk(self, rows: np.ndarray) -> None:
        """`[n, indexer_layers, index_topk]` int32, the next n rows; copied."""
        _asked_for(self._indexer_topk, "indexer_topk").add(rows)

    def add_sampling_mask(self, token_ids: np.ndarray, logprobs: np.ndarray | None = None) -> None:
        """Support of the next output token: `[k]` int32, `[k]` float32; copied."""
        ids = _asked_for(self._mask_token_ids, "sampling_mask")
        lengths = _asked_for(self._mask_lengths, "sampling_mask")
        if (logprobs is not None) != (self._mask_logprobs is not None):
            raise ValueError(
                "sampling_mask: log-probabilities are given exactly when sampling_mask_logprobs was asked for"
            )
        if logprobs is not None and self._mask_logprobs is not None:
            if logprobs.shape != token_ids.shape:
                raise ValueError(
                    f"sampling_mask: {token_ids.shape!r} token ids but {logprobs.shape!r} log-probabilities"
                )
            self._mask_logprobs.append(logprobs)
        ids.append(token_ids)
        lengths.append(np.array([len(token_ids)], np.int32))

    def to_stash(self, num_tokens_forwarded: int) -> TokenOutputStash:
        """Exactly the rows [start_row, num_tokens_forwarded).

        ValueError if fewer were collected: rows are never padded.

        The arrays are views of this collector's memory that later additions never change.
        """
        mask_lengths, mask_ids, mask_logprobs = self._mask_lengths, self._mask_token_ids, self._mask_logprobs
        return TokenOutputStash(
            routed_experts=self._routed_experts.until(num_tokens_forwarded) if self._routed_experts else None,
            indexer_topk=self._indexer_topk.until(num_tokens_forwarded) if self._indexer_topk else None,
            sampling_mask_lengths=mask_lengths.first(mask_lengths.num_rows) if mask_lengths else None,
            sampling_mask_token_ids=mask_ids.first(mask_ids.num_rows) if mask_ids else None,
            sampling_mask_logprobs=mask_logprobs.first(mask_logprobs.num_rows) if mask_logprobs else None,
        )

    def start_rows(self) -> dict[str, int]:
        """For `OutputStore.put_many(start_rows=[...])`: the per-token fields that were asked for."""
        return {
            rows.field: self._start_row
            for rows in (self._routed_experts, self._indexer_topk)
            if rows is not None
        }


def _asked_for(value: _T | None, field: str) -> _T:
    if value is None:
        raise ValueError(f"{field} was not asked for when the collector was made")
    return value
