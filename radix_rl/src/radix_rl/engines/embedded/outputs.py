"""From a finished sequence to its answer: replay outputs go inline, or into the store.

Replay rows are copied once, out of the slots, when the sequence ends. The arrays of that copy are what the
answer carries, and what the store encodes.
"""

import asyncio

import numpy as np

from radix_engine_plugins.writer import OutputStoreWriter
from radix_rl.engines.embedded.schedule.sequence import Sequence
from radix_rl.types import GenerateOutput
from radix_transfer_plugins import TokenOutputStash

_AT_ONCE_BYTES = 256 * 1024
"""Sampling masks within it are joined in less time than it takes to hand them to another thread."""


def stash_of(sequence: Sequence) -> TokenOutputStash | None:
    """The replay outputs of a finished request, without a copy of its rows.

    None if it asked for none, or if an abort left nothing to deliver.
    """
    request, rows = sequence.request, sequence.rows
    assert sequence.finish_reason is not None
    if not (sequence.wanted_rows or request.return_sampling_mask):
        return None
    if sequence.finish_reason.type == "abort" and not sequence.output_ids:
        return None
    lengths = token_ids = logprobs = None
    if request.return_sampling_mask:
        lengths = np.array([len(ids) for ids in sequence.mask_ids], np.int32)
        token_ids = np.concatenate([np.empty(0, np.int32), *sequence.mask_ids])
        if request.sampling_logprobs_mode == "support":
            logprobs = np.concatenate([np.empty(0, np.float32), *sequence.mask_logprobs])
    return TokenOutputStash(
        routed_experts=rows.get("routed_experts"),
        indexer_topk=rows.get("indexer_topk"),
        sampling_mask_lengths=lengths,
        sampling_mask_token_ids=token_ids,
        sampling_mask_logprobs=logprobs,
    )


def _joins_at_once(sequence: Sequence) -> bool:
    return sum(ids.nbytes for ids in sequence.mask_ids) <= _AT_ONCE_BYTES


async def build_output(
    sequence: Sequence, writer: OutputStoreWriter | None, weight_version: str | None
) -> GenerateOutput:
    """Stores the outputs first where the request asked for it.

    The caller owns the stored object; cancelling leaves none.
    """
    request = sequence.request
    assert sequence.finish_reason is not None
    ref = None
    # Masks may have tens of megabytes, which would keep the event loop from the others.
    outputs = stash_of(sequence) if _joins_at_once(sequence) else await asyncio.to_thread(stash_of, sequence)
    if outputs is not None and request.return_outputs_via_store:
        assert writer is not None
        start_rows = dict.fromkeys(sequence.rows, request.routed_experts_start_len)
        ref = await writer.write(outputs, start_rows)
        outputs = None
    return GenerateOutput(
        request_id=request.request_id,
        prompt_tokens=sequence.prompt_tokens,
        output_ids=tuple(sequence.output_ids),
        output_logprobs=tuple(sequence.output_logprobs),
        finish_reason=sequence.finish_reason,
        version_spans=tuple(sequence.version_spans),
        weight_version=weight_version,
        cached_tokens=sequence.cached_tokens,
        num_retractions=sequence.num_retractions,
        outputs=outputs,
        routed_experts_start=request.routed_experts_start_len,
        output_store_ref=ref,
    )
