"""What the trainer computes on: single samples without padding, and padded tensors of a microbatch."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch

from radix_rl.errors import ReplayError, TrainingError
from radix_rl.rollout.replay_index import PER_TOKEN_FIELDS
from radix_rl.rollout.sample import Sample


class SamplingMask(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The vocabulary that each of C response tokens was sampled from, one list after the other."""

    lengths: np.ndarray
    """`[C]` int32, 0 where a token was not sampled."""
    token_ids: np.ndarray
    """`[sum of lengths]` int32."""


class TrainSample(msgspec.Struct, kw_only=True, eq=False):
    """One sequence of N tokens, C of them its response, with what a training step needs to know of it."""

    name: str
    """How error messages call it."""
    tokens: np.ndarray
    """`[N]` int64."""
    loss_mask: np.ndarray
    """`[C]` float32, 1 where the token was sampled by the policy and counts."""
    rollout_logprobs: np.ndarray
    """`[C]` float32, 0 where loss_mask is 0."""
    advantage: float
    """Of every response token."""
    loss_scale: float
    """Weight of each counted token in the minibatch's loss, see `radix_rl.train.plan.loss_scales`."""
    routed_experts: np.ndarray | None = None
    """`[N - 1, layers, top_k]` int32 or narrower, row t = choices made while token t went through; -1 where
    there is none."""
    indexer_topk: np.ndarray | None = None
    """`[N - 1, indexers, index_topk]` int32 or narrower, likewise."""
    sampling_mask: SamplingMask | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_response_tokens(self) -> int:
        return len(self.loss_mask)

    @property
    def num_needed_rows(self) -> int:
        """Token rows that something counted depends on: those before the last token that counts.

        What follows it, such as the answer of a tool that ended the rollout, changes no loss.
        """
        counted = np.flatnonzero(self.loss_mask)
        return self.num_tokens - self.num_response_tokens + int(counted[-1]) if len(counted) else 0


class TrainBatch(msgspec.Struct, kw_only=True, eq=False):
    """B samples padded on the right to T tokens.

    Shape suffixes: b samples, t tokens, l layers, k experts a token.

    Position t of the `*_bt` response tensors speaks of token t itself; position 0 is never a response token.
    """

    names: tuple[str, ...]
    """How error messages call the samples."""
    input_ids_bt: torch.Tensor
    """int64; padding is token 0, which no real token attends to."""
    lengths_b: torch.Tensor
    """int64, real tokens of each sample."""
    loss_mask_bt: torch.Tensor
    """float32, 1 where the token was sampled by the policy and counts."""
    rollout_logprobs_bt: torch.Tensor
    """float32, 0 where loss_mask is 0."""
    advantages_bt: torch.Tensor
    """float32."""
    loss_scale_bt: torch.Tensor
    """float32, `TrainSample.loss_scale` where loss_mask is 1, else 0."""
    routed_experts_btlk: torch.Tensor | None = None
    """int32; -1 where there is no row (last token, padding, dense layer)."""
    indexer_topk_btik: torch.Tensor | None = None
    """int32, i indexers; -1 where there is no row or fewer keys exist."""
    mask_lengths_bt: torch.Tensor | None = None
    """int64, ids that token t was sampled from; 0 where it was not sampled."""
    mask_ids: torch.Tensor | None = None
    """int64, those ids one after the other, in the order of `mask_lengths_bt`."""

    @property
    def needed_rows_bt(self) -> torch.Tensor:
        """bool: the `num_needed_rows` first rows of each sample."""
        width = self.loss_mask_bt.shape[1]
        positions = torch.arange(width, device=self.loss_mask_bt.device)
        last_counted_b = torch.where(self.loss_mask_bt > 0, positions, 0).amax(dim=1)
        return positions < last_counted_b[:, None]


def make_train_sample(
    sample: Sample, *, advantage: float, loss_scale: float, replay: Mapping[str, np.ndarray]
) -> TrainSample:
    """`replay`: the sample's part of `assemble_replay`'s answer.

    Checks what a rollout hands over. Raises TrainingError for log-probabilities that are absent, ReplayError
    for rows of another number, rank or dtype than the sample's.
    """
    if len(sample.rollout_logprobs) != len(sample.loss_mask):
        raise TrainingError(
            f"sample {sample.name}: expected {len(sample.loss_mask)} rollout log-probabilities, one for each "
            f"response token, got {len(sample.rollout_logprobs)}"
        )
    for field in (*PER_TOKEN_FIELDS, "sampling_mask_lengths", "sampling_mask_token_ids"):
        if field in replay:
            _check_array(sample, field, replay[field])
    return TrainSample(
        name=sample.name,
        tokens=np.asarray(sample.tokens, dtype=np.int64),
        loss_mask=np.asarray(sample.loss_mask, dtype=np.float32),
        rollout_logprobs=np.asarray(sample.rollout_logprobs, dtype=np.float32),
        advantage=advantage,
        loss_scale=loss_scale,
        routed_experts=replay.get("routed_experts"),
        indexer_topk=replay.get("indexer_topk"),
        sampling_mask=_sampling_mask(sample, replay),
    )


def _check_array(sample: Sample, field: str, array: np.ndarray) -> None:
    rank = 3 if field in PER_TOKEN_FIELDS else 1
    # What does not fit int32 would name other experts, positions or tokens there.
    if array.ndim != rank or array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int32):
        raise ReplayError(
            f"sample {sample.name}: expected {field} of {rank} dimension{'s' * (rank > 1)} and int32 or a "
            f"narrower integer type, got {array.dtype} {array.shape}"
        )
    if field in PER_TOKEN_FIELDS and len(array) != len(sample.tokens) - 1:
        raise ReplayError(
            f"sample {sample.name}: expected {len(sample.tokens) - 1} rows of {field} for "
            f"{len(sample.tokens)} tokens, got {len(array)}"
        )


def _sampling_mask(sample: Sample, replay: Mapping[str, np.ndarray]) -> SamplingMask | None:
    """The sample's masks, if there are any.

    Raises ReplayError unless each token that counts was sampled from a mask that holds it: without, its
    probability here would be that of another distribution, or none.
    """
    if "sampling_mask_lengths" not in replay:
        return None
    lengths, ids = replay["sampling_mask_lengths"], replay["sampling_mask_token_ids"]
    if len(lengths) != len(sample.loss_mask) or (lengths < 0).any() or int(lengths.sum()) != len(ids):
        raise ReplayError(
            f"sample {sample.name}: expected sampling masks of {len(sample.loss_mask)} response tokens, got "
            f"{len(lengths)} lengths that add up to {int(lengths.sum())}, and {len(ids)} ids"
        )
    response = np.asarray(sample.tokens[sample.prompt_tokens :], dtype=np.int32)
    holds_its_token = np.zeros(len(lengths), dtype=bool)
    if len(ids):
        # The first id of each mask that has any; such masks are all that there is between two of them.
        starts = (np.cumsum(lengths, dtype=np.int64) - lengths)[lengths > 0]
        holds_its_token[lengths > 0] = np.logical_or.reduceat(ids == np.repeat(response, lengths), starts)
    without = np.flatnonzero((np.asarray(sample.loss_mask) > 0) & ~holds_its_token)
    if len(without):
        place = int(without[0])
        raise ReplayError(
            f"sample {sample.name}: response token {place} (id {response[place]}) is not in the mask of "
            f"{int(lengths[place])} ids that it was sampled from"
        )
    return SamplingMask(lengths=lengths, token_ids=ids)


def collate(samples: Sequence[TrainSample], device: torch.device) -> TrainBatch:
    """Pad samples to the longest of them. Each replay output is on all of them or on none."""
    num_samples, width = len(samples), max(sample.num_tokens for sample in samples)
    input_ids = np.zeros((num_samples, width), dtype=np.int64)
    response = {
        name: np.zeros((num_samples, width), dtype=np.float32)
        for name in ("mask", "rollout", "advantage", "scale")
    }
    for row, sample in enumerate(samples):
        input_ids[row, : sample.num_tokens] = sample.tokens
        span = slice(sample.num_tokens - sample.num_response_tokens, sample.num_tokens)
        response["mask"][row, span] = sample.loss_mask
        response["rollout"][row, span] = sample.rollout_logprobs * sample.loss_mask
        response["advantage"][row, span] = sample.advantage
        response["scale"][row, span] = sample.loss_scale * sample.loss_mask
    tensors = {name: torch.from_numpy(array).to(device) for name, array in response.items()}
    return TrainBatch(
        names=tuple(sample.name for sample in samples),
        input_ids_bt=torch.from_numpy(input_ids).to(device),
        lengths_b=torch.tensor([sample.num_tokens for sample in samples], device=device),
        loss_mask_bt=tensors["mask"],
        rollout_logprobs_bt=tensors["rollout"],
        advantages_bt=tensors["advantage"],
        loss_scale_bt=tensors["scale"],
        routed_experts_btlk=_pad_rows(samples, "routed_experts", width, device),
        indexer_topk_btik=_pad_rows(samples, "indexer_topk", width, device),
        **_join_masks(samples, width, device),
    )


def _pad_rows(
    samples: Sequence[TrainSample], field: str, width: int, device: torch.device
) -> torch.Tensor | None:
    first = getattr(samples[0], field)
    if first is None:
        return None
    padded = np.full((len(samples), width, *first.shape[1:]), -1, dtype=np.int32)
    for row, sample in enumerate(samples):
        rows = getattr(sample, field)
        if rows is None or rows.shape[1:] != first.shape[1:]:
            raise ReplayError(
                f"sample {sample.name}: expected {field} with rows of shape {first.shape[1:]} like sample "
                f"{samples[0].name}, got {None if rows is None else rows.shape[1:]}"
            )
        padded[row, : len(rows)] = rows
    return torch.from_numpy(padded).to(device)


def _join_masks(
    samples: Sequence[TrainSample], width: int, device: torch.device
) -> dict[str, torch.Tensor | None]:
    masks = [sample.sampling_mask for sample in samples]
    if masks[0] is None:
        return {"mask_lengths_bt": None, "mask_ids": None}
    lengths = np.zeros((len(samples), width), dtype=np.int64)
    for row, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
        if mask is None:
            raise ReplayError(f"sample {sample.name} has no sampling mask, sample {samples[0].name} has one")
        lengths[row, sample.num_tokens - sample.num_response_tokens : sample.num_tokens] = mask.lengths
    ids = np.concatenate([mask.token_ids for mask in masks if mask is not None], dtype=np.int64)
    return {
        "mask_lengths_bt": torch.from_numpy(lengths).to(device),
        "mask_ids": torch.from_numpy(ids).to(device),
    }


def split_microbatches(samples: Sequence[TrainSample], max_tokens: int) -> list[list[int]]:
    """Positions of samples, longest first, in groups of at most `max_tokens` tokens with padding.

    A sample longer than that is a group of its own. Neighbours in length share a group, so little is padding.
    """
    by_length = sorted(range(len(samples)), key=lambda position: -samples[position].num_tokens)
    groups: list[list[int]] = []
    for position in by_length:
        if groups and (len(groups[-1]) + 1) * samples[groups[-1][0]].num_tokens <= max_tokens:
            groups[-1].append(position)
        else:
            groups.append([position])
    return groups
