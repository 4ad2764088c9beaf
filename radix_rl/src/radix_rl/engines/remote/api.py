"""SGLang's `/generate`, from the client's side: engine requests as bodies, answers as `GenerateOutput`."""

import base64
import binascii
from typing import Any

import msgspec
import numpy as np

from radix_rl.errors import EngineError, ReplayError
from radix_rl.types import LOGPROB_FLOOR, FinishReason, GenerateOutput, GenerateRequest, VersionSpan
from radix_transfer_plugins import StoreRef, TokenOutputStash
from radix_transfer_plugins.errors import RefError
from radix_transfer_plugins.responses import REF_KEY

TokenShapes = dict[str, tuple[int, int]]
"""Field -> (layers, top_k) of its rows, told by the server or by the configuration; never inferred from a
length."""


def generate_body(request: GenerateRequest, rid: str) -> dict[str, Any]:
    """The body of one request. Fields that are not asked for are left out: a server may not know them."""
    sampling = msgspec.to_builtins(request.sampling)
    if "seed" in sampling:
        sampling["sampling_seed"] = sampling.pop("seed")
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(request.input_ids),
        "sampling_params": sampling,
        "return_logprob": True,
    }
    if request.return_routed_experts:
        body["return_routed_experts"] = True
    if request.return_routed_experts or request.return_indexer_topk:
        body["routed_experts_start_len"] = request.routed_experts_start_len
    if request.return_indexer_topk:
        body["return_indexer_topk"] = True
    if request.return_sampling_mask:
        body["return_sampling_mask"] = True
        body["sampling_logprobs_mode"] = request.sampling_logprobs_mode
    if request.return_outputs_via_store:
        body["return_outputs_via_store"] = True
    return body


def parse_answer(request: GenerateRequest, answer: Any, shapes: TokenShapes) -> GenerateOutput:
    """Turn SGLang's answer to one request into a GenerateOutput.

    Raises EngineError for an answer that is not SGLang's, ReplayError for a reference or inline outputs that
    cannot be decoded.
    """
    try:
        meta = answer["meta_info"]
        output_ids = tuple(answer["output_ids"])
        finish_reason = parse_finish_reason(meta["finish_reason"])
        return GenerateOutput(
            request_id=request.request_id,
            # A request that was aborted in the queue is answered without it.
            prompt_tokens=meta.get("prompt_tokens", len(request.input_ids)),
            output_ids=output_ids,
            output_logprobs=_output_logprobs(request, meta, len(output_ids)),
            finish_reason=finish_reason,
            version_spans=_version_spans(meta, len(output_ids)),
            cached_tokens=meta.get("cached_tokens", 0),
            num_retractions=meta.get("num_retractions", 0),
            outputs=_inline_outputs(request, meta, shapes),
            routed_experts_start=meta.get("routed_experts_start_len", request.routed_experts_start_len),
            output_store_ref=_store_ref(request, meta),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ReplayError):
            raise
        raise EngineError(
            f"request {request.request_id}: the server's answer is not of SGLang's shape: {error!r}"
        ) from error


def _store_ref(request: GenerateRequest, meta: dict[str, Any]) -> StoreRef | None:
    """The answer's reference, parsed and validated: here it enters the process."""
    if meta.get(REF_KEY) is None:
        return None
    try:
        return StoreRef.from_builtins(meta[REF_KEY])
    except RefError as error:
        raise ReplayError(
            f"request {request.request_id}: the answer's {REF_KEY} is not usable: {error}"
        ) from error


def parse_finish_reason(raw: dict[str, Any]) -> FinishReason:
    """SGLang adds names of its own to an abort (status_code, err_type); they are left out."""
    return FinishReason(
        type=raw["type"], matched=raw.get("matched"), length=raw.get("length"), message=raw.get("message")
    )


def _output_logprobs(request: GenerateRequest, meta: dict[str, Any], num_outputs: int) -> tuple[float, ...]:
    """Log-probabilities under the distribution that was sampled from.

    With a sampling mask SGLang returns them under a name of their own.
    """
    if request.return_sampling_mask:
        selected = request.sampling_logprobs_mode == "selected"
        name = "output_token_sampling_logprobs" if selected else "output_token_sampling_selected_logprobs"
        return tuple(_finite(value) for value in meta[name])
    if not num_outputs:
        return ()
    return tuple(_finite(entry[0]) for entry in meta["output_token_logprobs"])


def _finite(logprob: float | None) -> float:
    """SGLang writes null for one that is not finite. The rollout counts floored tokens."""
    return LOGPROB_FLOOR if logprob is None else float(logprob)


def _version_spans(meta: dict[str, Any], num_outputs: int) -> tuple[VersionSpan, ...]:
    if not num_outputs:
        return ()
    spans = meta.get("weight_versions") or [
        {"start": 0, "end": num_outputs, "version": meta["weight_version"]}
    ]
    return tuple(VersionSpan(start=s["start"], end=s["end"], version=str(s["version"])) for s in spans)


def _inline_outputs(
    request: GenerateRequest, meta: dict[str, Any], shapes: TokenShapes
) -> TokenOutputStash | None:
    arrays: dict[str, np.ndarray] = {}
    for field in ("routed_experts", "indexer_topk"):
        if meta.get(field) is not None:
            arrays[field] = _decode_rows(request, field, meta, shapes)
    if meta.get("output_token_sampling_mask") is not None:
        supports = meta["output_token_sampling_mask"]
        arrays["sampling_mask_lengths"] = np.array([len(ids) for ids in supports], dtype=np.int32)
        arrays["sampling_mask_token_ids"] = _flat(supports, np.int32)
        if request.sampling_logprobs_mode == "support":
            arrays["sampling_mask_logprobs"] = _flat(meta["output_token_sampling_logprobs"], np.float32)
    return TokenOutputStash(**arrays) if arrays else None


def _decode_rows(
    request: GenerateRequest, field: str, meta: dict[str, Any], shapes: TokenShapes
) -> np.ndarray:
    """base64 of int32 rows; our server tells their shape beside them."""
    where = f"request {request.request_id}, field {field!r}"
    told = meta.get(f"{field}_shape")
    num_layers, top_k = told[1:] if told else shapes.get(field, (0, 0))
    if not num_layers or not top_k:
        raise ReplayError(
            f"{where}: the server does not tell layers and top-k of these rows; give num_layers and "
            "experts_per_token in the engine's settings"
        )
    if shapes.get(field, (num_layers, top_k)) != (num_layers, top_k):
        raise ReplayError(
            f"{where}: rows of {num_layers} layers x {top_k}, expected {shapes[field]} for this model"
        )
    try:
        data = base64.b64decode(meta[field], validate=True)
    except binascii.Error as error:
        raise ReplayError(f"{where}: not base64: {error}") from error
    row_bytes = 4 * num_layers * top_k
    if len(data) % row_bytes:
        raise ReplayError(
            f"{where}: {len(data)} bytes, expected whole rows of {num_layers} layers x {top_k} int32 "
            f"({row_bytes} bytes)"
        )
    return np.frombuffer(data, dtype="<i4").reshape(-1, num_layers, top_k)


def _flat(rows: list[list[Any]], dtype: type) -> np.ndarray:
    return np.array([value for row in rows for value in row], dtype=dtype)
