"""Puts the outputs of a request that has ended, and only then lets its answer go on.

Hook: AROUND `TokenizerManager._wait_one_response`, whose generator single requests, items of batches, n >
1, streams, chat and `sglang.Engine` all read. The put is awaited here, in the request's own task:
`_handle_batch_output`, where the values arrive, serves everyone.
"""
# pyright: reportMissingImports=false

import asyncio
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

from radix_engine_plugins.fields import OPT_IN
from radix_engine_plugins.sglang import hooks
from radix_engine_plugins.sglang.handover import written_refs
from radix_engine_plugins.sglang.outputs import RequestOutputs, outputs_of
from radix_engine_plugins.sglang.request_fields import opted_in
from radix_engine_plugins.sglang.session import StoreSession
from radix_transfer_plugins import StoreRef
from radix_transfer_plugins.responses import REF_KEY

_ROWS = ("routed_experts", "indexer_topk")
_MASK_KEYS = ("output_token_sampling_mask", "output_token_sampling_mask_length")


class StreamStoreError(ValueError):
    """A put that failed under a stream, which SGLang ends with an error chunk that has this code."""

    status_code = HTTPStatus.INTERNAL_SERVER_ERROR.value


def wait_one_response(original: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> Any:
    state = manager.rid_to_state[obj.rid]
    responses = original(manager, obj, request)
    session = StoreSession.of(manager)
    if session is None or not (opted_in(obj) or getattr(obj, "sampling_logprobs_mode", None) == "support"):
        return responses
    return _stored(responses, session, obj, outputs_of(state), manager.incremental_streaming_output)


async def _stored(
    responses: Any, session: StoreSession, obj: Any, outputs: RequestOutputs, incremental: bool
) -> AsyncIterator[dict[str, Any]]:
    num_sent = 0
    try:
        async for response in responses:
            meta_info = response["meta_info"]
            if obj.return_sampling_mask and obj.sampling_logprobs_mode == "support":
                # Not all that have arrived: the next step's may be among them already.
                end = meta_info.get("completion_tokens", 0)
                meta_info["output_token_sampling_selected_logprobs"] = outputs.selected_logprobs[num_sent:end]
                num_sent = end if obj.stream and incremental else 0
            if opted_in(obj):
                _strip(meta_info, obj)
                if _delivers(meta_info):
                    ref = await _put(session, obj, outputs, meta_info)
                    if ref is not None:
                        written_refs(obj).add(ref, session.writer)
                        meta_info[REF_KEY] = ref.to_builtins()
            yield response
    finally:
        await responses.aclose()


def _strip(meta_info: dict[str, Any], obj: Any) -> None:
    """Leave no support-sized value in `meta_info`, in no chunk of a stream."""
    for name in _ROWS:
        if name in meta_info:
            raise _failure(
                obj, f"{name} arrived inline: the scheduler runs without the plugin; its log says why"
            )
    for name in _MASK_KEYS:
        meta_info.pop(name, None)
    if obj.sampling_logprobs_mode == "support":
        meta_info.pop("output_token_sampling_logprobs", None)


def _delivers(meta_info: dict[str, Any]) -> bool:
    """Whether this is the end, with an answer: one that was aborted before its first token has no outputs."""
    reason = meta_info.get("finish_reason")
    if reason is None:
        return False
    if reason["type"] != "abort":
        return True
    return reason.get("status_code") is None and meta_info.get("completion_tokens", 0) > 0


async def _put(
    session: StoreSession, obj: Any, outputs: RequestOutputs, meta_info: dict[str, Any]
) -> StoreRef | None:
    """None: there is nothing to store.

    Raises the error that fails the request; then nothing is left in the store.
    """
    mask_mode = (obj.sampling_logprobs_mode or "selected") if obj.return_sampling_mask else None
    aborted = meta_info["finish_reason"]["type"] == "abort"
    asked = [name for name in _ROWS if getattr(obj, f"return_{name}")]
    missing = [name for name in asked if name not in outputs.rows]
    if missing and aborted:
        # It was waiting in the queue again after a retraction, its cache slots given back and their rows
        # with them.
        return None
    if missing:
        raise _failure(obj, f"the engine captured no {' and no '.join(missing)}")
    if not asked and mask_mode is None:
        return None
    try:
        stash, start_rows = await asyncio.to_thread(outputs.to_stash, session.experts_codec, mask_mode)
        return await session.writer.write(stash, start_rows)
    except Exception as error:
        raise _failure(obj, f"{type(error).__name__}: {error}") from error


def _failure(obj: Any, reason: str) -> Exception:
    import fastapi

    message = f"{OPT_IN}: the outputs could not be stored: {reason}"
    if obj.stream:
        return StreamStoreError(message)
    return fastapi.HTTPException(status_code=HTTPStatus.INTERNAL_SERVER_ERROR, detail=message)


HOOKS = [
    (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_one_response",
        wait_one_response,
        hooks.AROUND,
    )
]
