"""Weights by which token losses add up to the loss of a minibatch, fixed before any forward pass.

With the weights given, a minibatch's loss is a plain sum over its tokens, so that microbatches and ranks
only add up.
"""

from collections.abc import Sequence
from typing import Literal

Reduction = Literal["token_mean", "sequence_mean", "constant"]


def loss_scales(counted_tokens: Sequence[int], reduction: Reduction, max_new_tokens: int) -> list[float]:
    """The weight of each sample's counted tokens, for the samples of one minibatch.

    `counted_tokens[i]` is sample i's sum of loss_mask.

    token_mean: 1 / all counted tokens. sequence_mean: 1 / (samples that count * the sample's counted tokens).
    constant: 1 / (samples * max_new_tokens), Dr.GRPO (Liu et al. 2025, section 3.1). A sample without
    counted tokens has weight 0.
    """
    total, num_counting = sum(counted_tokens), sum(count > 0 for count in counted_tokens)
    if reduction == "token_mean":
        return [1.0 / total if count else 0.0 for count in counted_tokens]
    if reduction == "sequence_mean":
        return [1.0 / (num_counting * count) if count else 0.0 for count in counted_tokens]
    return [1.0 / (len(counted_tokens) * max_new_tokens) if count else 0.0 for count in counted_tokens]
