"""`ReplayIndex`: which rows of which replay output lie where, for one sample. Built from answers without reading.

A field is a name of TokenOutputStash. Per-token fields (routed_experts, indexer_topk) are indexed by absolute token row;
the sampling mask by output token. Refs are kept as plain JSON types, so that a sample crosses process borders unchanged.
"""

from typing import Any

import msgspec
import numpy as np

from radix_rl.types import GenerateOutput, GenerateRequest


class StoreSegment(msgspec.Struct, frozen=True, kw_only=True, tag="store", forbid_unknown_fields=True):
    """Rows [start_row, end_row) of the sample are rows [start_row, end_row) (absolute) of `field` of `ref`."""

    start_row: int
    end_row: int
    ref: dict[str, Any]
    field: str


class InlineSegment(msgspec.Struct, frozen=True, kw_only=True, tag="inline", eq=False):
    """Rows [start_row, end_row) are `array` itself."""

    start_row: int
    end_row: int
    array: np.ndarray


Segment = StoreSegment | InlineSegment


class ReplayIndex(msgspec.Struct, kw_only=True, eq=False):
    segments: dict[str, list[Segment]] = {}
    """Field -> segments in row order, without gap or overlap."""

    def add_response(self, request: GenerateRequest, output: GenerateOutput, *, store_backend: str | None) -> None:
        """Append one answer's rows; a later turn replaces the boundary row of the turn before.

        Raises ReplayError for: a store request answered inline (names router and server flag as likely causes), a ref of
        another backend, spans that leave a gap or overlap, shapes that disagree with earlier turns.
        """
        raise NotImplementedError

    def truncate(self, num_tokens: int, prompt_tokens: int) -> None:
        """Keep what a sample of `num_tokens` tokens needs: rows below num_tokens - 1."""
        raise NotImplementedError

    def refs(self) -> list[dict[str, Any]]:
        """Every ref that was ever added, once each, also those whose rows were cut: all must be deleted."""
        raise NotImplementedError
