"""Batches the trainer computes on: packed or padded tensors of samples, with their replay outputs assembled."""

import msgspec
import torch


class TrainBatch(msgspec.Struct, kw_only=True, eq=False):
    """B samples padded on the right to T tokens. Shape suffixes: b samples, t tokens, l layers, k experts a token.

    Position t of the `*_bt` response tensors speaks of token t itself; position 0 is never a response token.
    """

    input_ids_bt: torch.Tensor
    """int64; padding is any valid id."""
    lengths_b: torch.Tensor
    """int64, real tokens of each sample."""
    loss_mask_bt: torch.Tensor
    """float32, 1 where the token was sampled by the policy and counts."""
    rollout_logprobs_bt: torch.Tensor
    """float32, 0 where loss_mask is 0."""
    advantages_bt: torch.Tensor
    """float32."""
    routed_experts_btlk: torch.Tensor | None = None
    """int32, row t = choices made while token t went through; -1 where there is no row (last token, padding, dense layer)."""
