"""`ReplayIndex`: which rows of which replay output lie where, for one sample.

Built from answers without reading.

A field is a name of TokenOutputStash. All rows are absolute token positions of the sample. Row t of a
per-token field (routed_experts, indexer_topk) holds the choices made while token t went through the model;
row t of the sampling mask is the support from which token t was sampled.
"""

from collections.abc import Iterator

import msgspec
import numpy as np

from radix_rl.errors import ReplayError
from radix_rl.types import GenerateOutput, GenerateRequest
from radix_transfer_plugins import StoreRef, TokenOutputStash

PER_TOKEN_FIELDS = ("routed_experts", "indexer_topk")
MASK_FIELDS = ("sampling_mask_lengths", "sampling_mask_token_ids", "sampling_mask_logprobs")
REPLAY_FIELDS = PER_TOKEN_FIELDS + MASK_FIELDS


class StoreSegment(msgspec.Struct, frozen=True, kw_only=True, tag="store", forbid_unknown_fields=True):
    """Rows [start_row, end_row) of the sample, held by one stored field.

    They are rows [start_row, end_row) (absolute) of `field` of `ref`.
    """

    start_row: int
    end_row: int
    ref: StoreRef
    field: str
    origin_row: int = 0
    """Sample row of the field's absolute row 0. Other than 0 for the sampling mask only, which is stored by
    output token: there sample row t is stored row t - origin_row."""


class InlineSegment(
    msgspec.Struct, frozen=True, kw_only=True, tag="inline", forbid_unknown_fields=True, eq=False
):
    """Rows [start_row, end_row) are `array` itself, whose first row is row `start_row`.

    The flat mask fields (token_ids, logprobs) have no rows of their own: their array begins with the
    support of row `start_row` and may go on past the last one; the lengths say where to cut.
    """

    start_row: int
    end_row: int
    array: np.ndarray


Segment = StoreSegment | InlineSegment


class ReplayIndex(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, eq=False):
    """The rows of one sample by field, in the answers that brought them.

    Two turns: a prompt of 3 tokens, an answer of 2, a tool's token, an answer of 2. An answer's last token
    does not go through the model in its turn; the next turn begins with it:

        token                   0  1  2  3  4  5  6  7
                                prompt   answ. t. answ.
        routed_experts          1  1  1  1  2  2  2  -      the turn whose ref holds the row
        sampling_mask_lengths   -  -  -  1  1  -  2  2

        segments["routed_experts"]:         rows [0, 4) of turn 1, [4, 7) of turn 2
        segments["sampling_mask_lengths"]:  rows [3, 5) of turn 1, [6, 8) of turn 2 (origin_row 3 and 6)

    `covered_rows` is 4 after the first turn, which is what the second one asks from.
    """

    segments: dict[str, list[Segment]] = {}
    """Field -> segments in row order, without overlap; per-token fields without gap, from row 0."""
    added_refs: list[StoreRef] = []
    """See `refs`."""

    @property
    def covered_rows(self) -> int:
        """Number of rows, from row 0 on, that the per-token fields hold.

        It is the `routed_experts_start_len` of the next turn.
        """
        ends = [segments[-1].end_row for name, segments in self.segments.items() if name in PER_TOKEN_FIELDS]
        return min(ends, default=0)

    def add_response(
        self, request: GenerateRequest, output: GenerateOutput, *, store_backend: str | None
    ) -> None:
        """Append one answer's rows; a later turn replaces the boundary row of the turn before.

        All or nothing.

        An answer that was aborted before its first token may carry no rows. A ref of the expected backend
        is listed by `refs` even when the answer is refused, so that it can be deleted.

        Raises ReplayError for: a store request answered inline (names router and server flag as likely
        causes), a ref of another backend, spans that leave a gap or overlap, shapes that disagree with
        earlier turns.
        """
        ref = self._accept_ref(request, output, store_backend)
        wanted = requested_fields(request)
        present = _fields_of_answer(output, ref)
        for field in present:
            if field not in REPLAY_FIELDS:
                raise ReplayError(
                    f"request {request.request_id}: unknown replay output {field!r} in the answer; known: "
                    f"{', '.join(REPLAY_FIELDS)}"
                )
            if field not in wanted:
                raise ReplayError(
                    f"request {request.request_id}: the answer carries {field!r}, which was not asked for"
                )
        if not present and (not wanted or (output.finish_reason.type == "abort" and not output.output_ids)):
            return
        missing = [field for field in wanted if field not in present]
        if missing:
            raise ReplayError(_missing_message(request, missing))
        joined = {field: self._joined(field, request, output, ref) for field in wanted}
        self.segments.update(joined)

    def truncate(self, num_tokens: int, prompt_tokens: int) -> None:
        """Keep the rows that a sample of `num_tokens` tokens needs.

        Rows below num_tokens - 1 (the mask's: below num_tokens).
        """
        if num_tokens < prompt_tokens:
            raise ReplayError(f"cannot cut to {num_tokens} tokens: the prompt has {prompt_tokens}")
        for field, segments in self.segments.items():
            limit = num_tokens - 1 if field in PER_TOKEN_FIELDS else num_tokens
            kept = [_cut_end(field, segment, limit) for segment in segments if segment.start_row < limit]
            # The last of them stays with zero rows: no rows differs from a field that was not asked for.
            self.segments[field] = kept or [_cut_end(field, segments[0], segments[0].start_row)]

    def refs(self) -> list[StoreRef]:
        """Every ref that was ever added, once each, also those whose rows were cut: all must be deleted."""
        return list({ref.key: ref for ref in self.added_refs}.values())

    def _accept_ref(
        self, request: GenerateRequest, output: GenerateOutput, store_backend: str | None
    ) -> StoreRef | None:
        """Check where the answer's outputs are, and remember its ref."""
        name = f"request {request.request_id}"
        if output.output_store_ref is None:
            if output.outputs is not None and request.return_outputs_via_store:
                raise ReplayError(
                    f"{name} asked for its replay outputs through the store and was answered inline. Likely "
                    "causes: a router between client and server dropped the field return_outputs_via_store "
                    "(use one that passes unknown fields on), or the server runs without the output store "
                    "(start it with --output-store-backend, and for SGLang or vLLM with the "
                    "radix-engine-plugins package installed)"
                )
            return None
        ref = output.output_store_ref
        if ref.backend != store_backend:
            raise ReplayError(
                f"{name}: the answer's ref is of backend {ref.backend!r}, expected {store_backend!r}: the "
                "engine and this run must be configured with the same output store"
            )
        self.added_refs.append(ref)
        if not request.return_outputs_via_store:
            raise ReplayError(f"{name} asked for inline outputs and was answered with a store reference")
        if output.outputs is not None:
            raise ReplayError(
                f"{name}: the answer carries both a store reference and inline outputs; expected one"
            )
        return ref

    def _joined(
        self, field: str, request: GenerateRequest, output: GenerateOutput, ref: StoreRef | None
    ) -> list[Segment]:
        """The field's segments with the answer's rows at the end."""
        earlier = self.segments.get(field, [])
        start, end = _span(field, request, output, ref)
        segment = _make_segment(field, output, ref, start, end)
        where = f"request {request.request_id}, field {field!r}"
        if earlier:
            _check_same_kind(where, earlier[-1], segment)
        if field in MASK_FIELDS:
            if earlier and start < earlier[-1].end_row:
                raise ReplayError(
                    f"{where}: output tokens from {start} on overlap those before {earlier[-1].end_row}"
                )
            return [*earlier, segment]
        covered = earlier[-1].end_row if earlier else 0
        if start > covered:
            raise ReplayError(
                f"{where}: gap: rows [{covered}, {start}) are missing; ask from row {covered} on"
            )
        if start < covered - 1:
            raise ReplayError(
                f"{where}: overlap: rows [{start}, {covered}) were asked for again; set "
                f"routed_experts_start_len={covered} to continue"
            )
        # An overlap of one row is the boundary token, which the later turn ran through the model again: its
        # row belongs to the forward pass that gave the next token's log-probability.
        kept = [_cut_end(field, old, start) for old in earlier if old.start_row < start]
        return [*kept, segment]


def requested_fields(request: GenerateRequest) -> list[str]:
    """Fields of TokenOutputStash that a request asks for."""
    fields = []
    if request.return_routed_experts:
        fields.append("routed_experts")
    if request.return_indexer_topk:
        fields.append("indexer_topk")
    if request.return_sampling_mask:
        fields += ["sampling_mask_lengths", "sampling_mask_token_ids"]
        if request.sampling_logprobs_mode == "support":
            fields.append("sampling_mask_logprobs")
    return fields


def forwarded_tokens(prompt_tokens: int, output_tokens: int) -> int:
    """Tokens that went through the model: the last sampled one never does."""
    return prompt_tokens + max(output_tokens - 1, 0)


def _fields_of_answer(output: GenerateOutput, ref: StoreRef | None) -> list[str]:
    if ref is not None:
        return list(ref.fields)
    return list(_inline_arrays(output.outputs)) if output.outputs is not None else []


def _inline_arrays(stash: TokenOutputStash) -> Iterator[str]:
    return (name for name in stash.__struct_fields__ if getattr(stash, name) is not None)


def _missing_message(request: GenerateRequest, missing: list[str]) -> str:
    if request.return_outputs_via_store:
        return (
            f"request {request.request_id} asked for {', '.join(missing)} through the store and the answer "
            "has no reference to it. Likely causes: a router between client and server dropped the "
            "request's fields, or the server runs without --output-store-backend (for SGLang or vLLM also "
            "without the radix-engine-plugins package) or without --enable-return-routed-experts"
        )
    return (
        f"request {request.request_id} asked for {', '.join(missing)} and the answer has none: is the server "
        "started with --enable-return-routed-experts, and does a router between pass the request's fields "
        "on?"
    )


def _span(
    field: str, request: GenerateRequest, output: GenerateOutput, ref: StoreRef | None
) -> tuple[int, int]:
    """Sample rows [start, end) that this answer is to contribute; checks them against what it holds."""
    where = f"request {request.request_id}, field {field!r}"
    prompt, outputs = output.prompt_tokens, len(output.output_ids)
    if prompt != len(request.input_ids):
        raise ReplayError(
            f"{where}: the engine counted {prompt} prompt tokens, expected {len(request.input_ids)}"
        )
    shape, used_start = _shape_and_start(field, output, ref)
    if field in MASK_FIELDS:
        if len(shape) != 1 or (field == "sampling_mask_lengths" and shape[0] != outputs):
            raise ReplayError(
                f"{where}: shape {shape}, expected one dimension (lengths: {outputs} output tokens)"
            )
        return prompt, prompt + outputs
    if len(shape) != 3:
        raise ReplayError(f"{where}: shape {shape}, expected (rows, layers, top_k)")
    end = forwarded_tokens(prompt, outputs)
    wanted_start = request.routed_experts_start_len
    if used_start + shape[0] != end:
        hint = ""
        if shape[0] == end:
            hint = "; the engine seems to have ignored routed_experts_start_len without saying so"
        raise ReplayError(
            f"{where}: rows [{used_start}, {used_start + shape[0]}), expected them to end at {end} for "
            f"{prompt} prompt and {outputs} output tokens{hint}"
        )
    if used_start > wanted_start:
        raise ReplayError(f"{where}: rows start at {used_start}, asked from {wanted_start}: a gap")
    # An engine that says it started earlier than asked still delivers every row; the surplus is never read.
    return wanted_start, end


def _shape_and_start(field: str, output: GenerateOutput, ref: StoreRef | None) -> tuple[tuple[int, ...], int]:
    """Shape of the answer's array and absolute row of its row 0."""
    if ref is not None:
        spec = ref.fields[field]
        return spec.shape, spec.start_row
    return getattr(output.outputs, field).shape, output.routed_experts_start


def _make_segment(field: str, output: GenerateOutput, ref: StoreRef | None, start: int, end: int) -> Segment:
    if ref is not None:
        origin = start if field in MASK_FIELDS else 0
        return StoreSegment(start_row=start, end_row=end, ref=ref, field=field, origin_row=origin)
    array = getattr(output.outputs, field)
    if field in PER_TOKEN_FIELDS:
        array = array[start - output.routed_experts_start :]
    return InlineSegment(start_row=start, end_row=end, array=array)


def _cut_end(field: str, segment: Segment, end_row: int) -> Segment:
    end_row = min(segment.end_row, end_row)
    if isinstance(segment, StoreSegment):
        return msgspec.structs.replace(segment, end_row=end_row)
    array = segment.array
    if field in PER_TOKEN_FIELDS:
        array = array[: end_row - segment.start_row]
    return InlineSegment(start_row=segment.start_row, end_row=end_row, array=array)


def _check_same_kind(where: str, earlier: Segment, later: Segment) -> None:
    if type(earlier) is not type(later):
        raise ReplayError(
            f"{where}: one turn came inline and another through the store; expected one source per field"
        )
    if _row_kind(earlier) != _row_kind(later):
        raise ReplayError(
            f"{where}: rows of shape and dtype {_row_kind(later)}, expected {_row_kind(earlier)} as in the "
            "turn before"
        )


def _row_kind(segment: Segment) -> tuple[tuple[int, ...], str]:
    if isinstance(segment, StoreSegment):
        spec = segment.ref.fields[segment.field]
        return spec.shape[1:], spec.dtype
    return segment.array.shape[1:], segment.array.dtype.name
