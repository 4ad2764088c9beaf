"""Tokenizer: rows and masks arrive with the batches that the detokenizer sends.

Hooks:
- AROUND `TokenizerManager._handle_batch_output`: takes masks before they become lists of Python ints; in
  support mode picks each sampled token's log-probability from its support.
- AROUND `TokenizerManager.update_request_meta_info`: takes the packed rows out of `customized_info`.

Both run in the loop that serves every request and ends the server when it raises: what goes wrong with one
request is noted in its outputs and becomes its error. Nothing here waits or copies more than a chunk.
"""
# pyright: reportMissingImports=false

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from radix_engine_plugins.logprobs import floored
from radix_engine_plugins.sglang import hooks
from radix_engine_plugins.sglang.outputs import MaskChunk, RequestOutputs, outputs_of
from radix_engine_plugins.sglang.request_fields import opted_in
from radix_engine_plugins.sglang.session import StoreSession
from radix_engine_plugins.sglang.wire import KEY, PackedRows

logger = logging.getLogger(__name__)


class TakenMask:
    """Placeholder for a mask that goes to the store.

    Tells SGLang the log-probabilities that stay in `meta_info`.
    """

    def __init__(self, selected_logprobs: list[float]) -> None:
        self._selected_logprobs = selected_logprobs

    def to_lists(self, support_logprobs: bool) -> tuple[list[list[int]], list[float]]:
        return [], self._selected_logprobs


def handle_batch_output(original: Callable[..., Any], manager: Any, batch: Any) -> Any:
    masks = getattr(batch, "output_token_sampling_mask", None)
    session = StoreSession.of(manager)
    if session is not None and masks is not None:
        for i, rid in enumerate(batch.rids):
            state = manager.rid_to_state.get(rid)
            if state is not None and getattr(state.obj, "return_sampling_mask", False):
                masks[i] = _take_mask(session, state, masks[i], batch.output_ids[i])
    return original(manager, batch)


def _take_mask(session: StoreSession, state: Any, mask: Any | None, output_ids: Sequence[int]) -> Any:
    """The mask to go on with, which an inline answer shows."""
    if mask is None:
        # A request for no token at all: the scheduler was not asked for one (marking.py).
        return TakenMask([])
    outputs = outputs_of(state)
    support = state.obj.sampling_logprobs_mode == "support"
    logprobs, num_floored = floored(mask.logprobs)
    if num_floored:
        session.writer.metrics.floored_logprobs.inc(num_floored)
    chunk = MaskChunk(mask.lengths, mask.token_ids, logprobs)
    if support:
        _pick_selected(outputs, chunk, output_ids)
    if not opted_in(state.obj):
        return mask
    outputs.masks.append(chunk)
    return TakenMask([] if support else logprobs.tolist())


def _pick_selected(outputs: RequestOutputs, mask: MaskChunk, output_ids: Sequence[int]) -> None:
    num_tokens = len(mask.lengths)
    if num_tokens != len(output_ids):
        outputs.error = f"sampling mask: {num_tokens} supports for {len(output_ids)} output tokens"
        return
    sampled = np.repeat(np.asarray(output_ids, dtype=np.int64), mask.lengths)
    positions = np.flatnonzero(mask.token_ids == sampled)
    if len(positions) != num_tokens:
        outputs.error = (
            f"sampling mask: {num_tokens} tokens were sampled, {len(positions)} of them in their support"
        )
        return
    outputs.selected_logprobs.extend(mask.logprobs[positions].tolist())


def update_request_meta_info(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, list],
    index: int,
    finish_reason: dict[str, Any] | None,
) -> None:
    if KEY in customized_info:
        for packed in customized_info[KEY][index] or ():
            rows = PackedRows(*packed)
            outputs_of(state).rows[rows.field] = rows
        customized_info = {key: values for key, values in customized_info.items() if key != KEY}
    original(manager, meta_info, state, customized_info, index, finish_reason)


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HOOKS = [
    (f"{_MANAGER}._handle_batch_output", handle_batch_output, hooks.AROUND),
    (f"{_MANAGER}.update_request_meta_info", update_request_meta_info, hooks.AROUND),
]
