"""From a finished sequence to its answer: replay rows go through the collector, inline or into the store."""

import asyncio

from radix_engine_plugins.collector import TokenOutputCollector
from radix_engine_plugins.writer import OutputStoreWriter
from radix_rl.engines.embedded.schedule.sequence import Sequence
from radix_rl.types import GenerateOutput
from radix_transfer_plugins import TokenOutputStash

_AT_ONCE_BYTES = 256 * 1024
_AT_ONCE_MASKS = 8
"""Rows and masks within both are collected in less time than it takes to hand them to another thread."""


def collect_outputs(sequence: Sequence) -> TokenOutputCollector | None:
    """The collector of a finished request; None if it asked for nothing or an abort left nothing to
    deliver.
    """
    request = sequence.request
    wants_any = request.return_routed_experts or request.return_indexer_topk or request.return_sampling_mask
    assert sequence.finish_reason is not None
    if not wants_any or (sequence.finish_reason.type == "abort" and not sequence.output_ids):
        return None
    experts, indexer = sequence.rows.get("routed_experts"), sequence.rows.get("indexer_topk")
    collector = TokenOutputCollector(
        routed_experts_shape=None if experts is None else (experts.shape[1], experts.shape[2]),
        indexer_topk_shape=None if indexer is None else (indexer.shape[1], indexer.shape[2]),
        sampling_mask=request.return_sampling_mask,
        sampling_mask_logprobs=request.return_sampling_mask and request.sampling_logprobs_mode == "support",
        start_row=request.routed_experts_start_len,
    )
    if experts is not None:
        collector.add_routed_experts(experts)
    if indexer is not None:
        collector.add_indexer_topk(indexer)
    with_logprobs = request.sampling_logprobs_mode == "support"
    for ids, logprobs in zip(sequence.mask_ids, sequence.mask_logprobs, strict=True):
        collector.add_sampling_mask(ids, logprobs if with_logprobs else None)
    return collector


def _stash(sequence: Sequence) -> tuple[TokenOutputStash | None, dict[str, int]]:
    """The outputs to deliver, and their start rows."""
    collector = collect_outputs(sequence)
    if collector is None:
        return None, {}
    return collector.to_stash(sequence.forwarded_tokens), collector.start_rows()


def _collects_at_once(sequence: Sequence) -> bool:
    num_bytes = sum(rows.nbytes for rows in sequence.rows.values())
    return num_bytes <= _AT_ONCE_BYTES and len(sequence.mask_ids) <= _AT_ONCE_MASKS


async def build_output(
    sequence: Sequence, writer: OutputStoreWriter | None, weight_version: str | None
) -> GenerateOutput:
    """Stores the outputs first where the request asked for it. The caller owns the stored object; cancelling
    leaves none.
    """
    request = sequence.request
    assert sequence.finish_reason is not None
    outputs, ref = None, None
    if request.return_routed_experts or request.return_indexer_topk or request.return_sampling_mask:
        if _collects_at_once(sequence):
            outputs, start_rows = _stash(sequence)
        else:
            # Long answers have tens of megabytes, and their masks a row for each token: that would keep the
            # event loop from the others.
            outputs, start_rows = await asyncio.to_thread(_stash, sequence)
        if outputs is not None and request.return_outputs_via_store:
            assert writer is not None
            ref = (await writer.write(outputs, start_rows)).to_builtins()
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
