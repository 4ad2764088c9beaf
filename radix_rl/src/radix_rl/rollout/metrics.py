"""Figures of one rollout."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from radix_rl.rollout.replay_index import MASK_FIELDS, Segment, StoreSegment
from radix_rl.rollout.sample import Sample


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over scored samples, and the bytes of their answers' replay part, see `replay_bytes`."""
    lengths = [len(sample.tokens) - sample.prompt_tokens for sample in samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    inline_bytes, store_bytes, stored_bytes = replay_bytes(samples)
    mask_ids = sampling_mask_ids(samples)
    return {
        "rollout/reward_mean": float(np.mean(rewards)),
        "rollout/reward_std": float(np.std(rewards)),
        "rollout/response_tokens_mean": float(np.mean(lengths)),
        "rollout/response_tokens_max": float(max(lengths)),
        "rollout/cut_share": float(np.mean([sample.finish_reason.type == "length" for sample in samples])),
        "rollout/entropy": sampled_entropy(samples),
        "rollout/floored_tokens": float(sum(sample.floored_tokens for sample in samples)),
        "rollout/sampling_mask_ids_mean": mask_ids / max(sum(lengths), 1),
        "rollout/response_bytes_inline": float(inline_bytes),
        "rollout/response_bytes_store": float(store_bytes),
        "rollout/stored_bytes": float(stored_bytes),
    }


def sampled_entropy(samples: Sequence[Sample]) -> float:
    """Mean of -log p over sampled tokens, in nats: an unbiased estimate of the policy's entropy a token.

    Under the distribution sampled from, temperature and truncation included.
    """
    counted = sum(sum(sample.loss_mask) for sample in samples)
    total = sum(
        logprob
        for sample in samples
        for logprob, counts in zip(sample.rollout_logprobs, sample.loss_mask, strict=True)
        if counts
    )
    return -total / max(counted, 1)


def equal_groups(samples: Sequence[Sample]) -> set[int]:
    """Ids of the groups whose rewards are all equal."""
    rewards: dict[int, set[float | None]] = {}
    for sample in samples:
        rewards.setdefault(sample.group_id, set()).add(sample.reward)
    return {group_id for group_id, values in rewards.items() if len(values) == 1}


def sampling_mask_ids(samples: Sequence[Sample]) -> int:
    """Vocabulary ids in the sampling masks of the samples' answers; nothing is read for it."""
    segments = [
        segment for sample in samples for segment in sample.replay.segments.get("sampling_mask_token_ids", [])
    ]
    return sum(
        segment.ref.fields[segment.field].shape[0]
        if isinstance(segment, StoreSegment)
        else len(segment.array)
        for segment in segments
    )


def replay_bytes(samples: Sequence[Sample]) -> tuple[int, int, int]:
    """Bytes of the replay outputs: in JSON answers as base64, of the refs in their place, and stored.

    Without a store the second is the first: what was sent is what travels.
    """
    inline_bytes = 0
    for sample in samples:
        for segments in sample.replay.segments.values():
            inline_bytes += sum(_base64_length(_raw_bytes(segment)) for segment in segments)
    refs = {ref.key: ref for sample in samples for ref in sample.replay.refs()}
    store_bytes = sum(len(msgspec.json.encode(ref.to_builtins())) for ref in refs.values())
    stored_bytes = sum(spec.stored_bytes for ref in refs.values() for spec in ref.fields.values())
    return inline_bytes, store_bytes if refs else inline_bytes, stored_bytes


def _raw_bytes(segment: Segment) -> int:
    if not isinstance(segment, StoreSegment):
        return segment.array.nbytes
    spec = segment.ref.fields[segment.field]
    rows = segment.end_row - segment.start_row
    if segment.field in MASK_FIELDS:
        rows = spec.shape[0]
    return rows * math.prod(spec.shape[1:]) * spec.numpy_dtype.itemsize


def _base64_length(num_bytes: int) -> int:
    return 4 * math.ceil(num_bytes / 3)
