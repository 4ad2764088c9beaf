"""An engine's output as SGLang's `/generate` answers it: text, output ids and `meta_info`."""

import base64
import time
from typing import Any

import numpy as np

from radix_rl.server.items import Item, Tokenizer
from radix_rl.types import FinishReason, GenerateOutput, PartialOutput, VersionSpan
from radix_transfer_plugins import TokenOutputStash


def meta_info(item: Item, output: GenerateOutput, tokenizer: Tokenizer, start_s: float) -> dict[str, Any]:
    """`meta_info` of a finished answer; `start_s` is on the clock of `time.perf_counter`.

    SGLang's keys, and three more: `output_store_ref`, and for replay outputs inline their start row and shape
    (`routed_experts_start_len`, `routed_experts_shape`, `indexer_topk_shape`), which no length of a buffer
    can tell.
    """
    info = _counts(item, output, finish_reason(output.finish_reason))
    if item.return_logprob:
        info.update(_logprobs(item, output, tokenizer))
    if output.output_store_ref is not None:
        info["output_store_ref"] = output.output_store_ref.to_builtins()
    if output.outputs is not None:
        info.update(_inline(output, output.outputs))
    if item.request.return_sampling_mask:
        info.update(_sampled_logprobs(item, output))
    info["e2e_latency"] = time.perf_counter() - start_s
    info["response_sent_to_client_ts"] = time.time()
    return info


def partial_meta_info(item: Item, output: PartialOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    """`meta_info` of an event before the last: no replay outputs, `finish_reason` null."""
    info = _counts(item, output, None)
    if item.return_logprob:
        info.update(_logprobs(item, output, tokenizer))
    return info


def finish_reason(reason: FinishReason) -> dict[str, Any]:
    if reason.type == "stop":
        return {"type": "stop", "matched": reason.matched}
    if reason.type == "length":
        return {"type": "length", "length": reason.length}
    return {"type": "abort", "message": reason.message or "Aborted"}


def _counts(
    item: Item, output: GenerateOutput | PartialOutput, reason: dict[str, Any] | None
) -> dict[str, Any]:
    spans = output.version_spans
    if not spans and isinstance(output, GenerateOutput) and output.weight_version is not None:
        # An answer without tokens has a version all the same.
        spans = (VersionSpan(start=0, end=0, version=output.weight_version),)
    return {
        "id": item.request.request_id,
        "finish_reason": reason,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": len(output.output_ids),
        "cached_tokens": output.cached_tokens,
        "num_retractions": output.num_retractions,
        "reasoning_tokens": 0,
        "cached_tokens_details": {"device": output.cached_tokens, "host": 0}
        if output.cached_tokens
        else None,
        "dp_rank": None,
        "weight_version": spans[-1].version if spans else None,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in spans
        ],
    }


def _logprobs(item: Item, output: GenerateOutput | PartialOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    ids = output.output_ids
    texts = (
        [tokenizer.decode([token]) for token in ids] if item.return_text_in_logprobs else [None] * len(ids)
    )
    return {
        "input_token_logprobs": [],
        "output_token_logprobs": list(zip(output.output_logprobs, ids, texts, strict=True)),
        "output_token_logprobs_length": len(ids),
    }


def _inline(output: GenerateOutput, stash: TokenOutputStash) -> dict[str, Any]:
    info: dict[str, Any] = {}
    if stash.routed_experts is not None:
        info["routed_experts"] = _base64_int32(stash.routed_experts)
        info["routed_experts_shape"] = list(stash.routed_experts.shape)
    if stash.indexer_topk is not None:
        info["indexer_topk"] = _base64_int32(stash.indexer_topk)
        info["indexer_topk_shape"] = list(stash.indexer_topk.shape)
    if stash.routed_experts is not None or stash.indexer_topk is not None:
        info["routed_experts_start_len"] = output.routed_experts_start
    if stash.sampling_mask_lengths is not None and stash.sampling_mask_token_ids is not None:
        info["output_token_sampling_mask"] = _rows(stash.sampling_mask_token_ids, stash.sampling_mask_lengths)
        info["output_token_sampling_mask_length"] = len(stash.sampling_mask_lengths)
        if stash.sampling_mask_logprobs is not None:
            rows = _rows(stash.sampling_mask_logprobs, stash.sampling_mask_lengths)
            info["output_token_sampling_logprobs"] = rows
    return info


def _sampled_logprobs(item: Item, output: GenerateOutput) -> dict[str, Any]:
    """One float a token, which stays in the response whether or not the supports went to the store."""
    support = item.request.sampling_logprobs_mode == "support"
    name = "output_token_sampling_selected_logprobs" if support else "output_token_sampling_logprobs"
    return {name: list(output.output_logprobs)}


def _base64_int32(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype="<i4").data).decode("ascii")


def _rows(values: np.ndarray, lengths: np.ndarray) -> list[list[Any]]:
    return [row.tolist() for row in np.split(values, np.cumsum(lengths)[:-1])] if len(lengths) else []
