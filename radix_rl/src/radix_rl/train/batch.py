"""Batches the trainer computes on: single samples without padding, and padded tensors of a microbatch of
them."""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from radix_rl.errors import ReplayError, TrainingError
from radix_rl.rollout.sample import Sample


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
    """Weight of each counted token in the minibatch's loss, see `radix_rl.train.reduction`."""
    routed_experts: np.ndarray | None = None
    """`[N - 1, layers, top_k]` int32, row t = choices made while token t went through; -1 where there is
    none."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_response_tokens(self) -> int:
        return len(self.loss_mask)


class TrainBatch(msgspec.Struct, kw_only=True, eq=False):
    """B samples padded on the right to T tokens. Shape suffixes: b samples, t tokens, l layers, k experts a
    token.

    Position t of the `*_bt` response tensors speaks of token t itself; position 0 is never a response token.
    """

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


def make_train_sample(
    sample: Sample, *, advantage: float, loss_scale: float, routed_experts: np.ndarray | None
) -> TrainSample:
    """Checks what a rollout hands over. Raises TrainingError for log-probabilities that are absent."""
    if len(sample.rollout_logprobs) != len(sample.loss_mask):
        raise TrainingError(
            f"sample {sample.name}: expected {len(sample.loss_mask)} rollout log-probabilities, one for each "
            "response "
            f"token, got {len(sample.rollout_logprobs)}"
        )
    if routed_experts is not None and len(routed_experts) != len(sample.tokens) - 1:
        raise ReplayError(
            f"sample {sample.name}: expected {len(sample.tokens) - 1} rows of routed_experts for "
            f"{len(sample.tokens)} tokens, got {len(routed_experts)}"
        )
    return TrainSample(
        name=sample.name,
        tokens=np.asarray(sample.tokens, dtype=np.int64),
        loss_mask=np.asarray(sample.loss_mask, dtype=np.float32),
        rollout_logprobs=np.asarray(sample.rollout_logprobs, dtype=np.float32),
        advantage=advantage,
        loss_scale=loss_scale,
        routed_experts=routed_experts,
    )


def collate(samples: Sequence[TrainSample], device: torch.device) -> TrainBatch:
    """Pad samples to the longest of them. Either all or none have routed experts."""
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
        input_ids_bt=torch.from_numpy(input_ids).to(device),
        lengths_b=torch.tensor([sample.num_tokens for sample in samples], device=device),
        loss_mask_bt=tensors["mask"],
        rollout_logprobs_bt=tensors["rollout"],
        advantages_bt=tensors["advantage"],
        loss_scale_bt=tensors["scale"],
        routed_experts_btlk=_pad_experts(samples, width, device),
    )


def _pad_experts(samples: Sequence[TrainSample], width: int, device: torch.device) -> torch.Tensor | None:
    first = samples[0].routed_experts
    if first is None:
        return None
    padded = np.full((len(samples), width, *first.shape[1:]), -1, dtype=np.int32)
    for row, sample in enumerate(samples):
        if sample.routed_experts is None or sample.routed_experts.shape[1:] != first.shape[1:]:
            got = None if sample.routed_experts is None else sample.routed_experts.shape[1:]
            raise ReplayError(
                f"sample {sample.name}: expected routed_experts of {first.shape[1:]} layers and experts a "
                "token like "
                f"sample {samples[0].name}, got {got}"
            )
        padded[row, : len(sample.routed_experts)] = sample.routed_experts
    return torch.from_numpy(padded).to(device)


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
