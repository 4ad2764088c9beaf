"""What an engine hands to the store: one Struct of arrays for each response."""

from collections.abc import Collection

import msgspec
import numpy as np

from radix_transfer_plugins.codecs.base import Codec
from radix_transfer_plugins.codecs.deltas import DeltasCodec
from radix_transfer_plugins.codecs.experts import MAX_EXPERTS, MAX_LAYERS, ExpertsCodec
from radix_transfer_plugins.codecs.narrow import MAX_IDS, NarrowCodec
from radix_transfer_plugins.codecs.positions import PositionBlocksCodec


class TokenOutputStash(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, eq=False):
    """The replay outputs of one response.

    None means "not asked for"; zero rows is a legal answer and differs from None. Row i of the per-token
    fields holds the choices made while token `start_row + i` went through the model. The sampling mask is in
    CSR form over the output tokens.
    """

    routed_experts: np.ndarray | None = None
    """`[rows, layers, top_k]` int32, expert ids in the router's order; -1 where a layer does not route."""
    indexer_topk: np.ndarray | None = None
    """`[rows, indexer_layers, index_topk]` int32, request-local key positions, -1 where fewer exist.

    A set per row.
    """
    sampling_mask_lengths: np.ndarray | None = None
    """`[outputs]` int32, size of each output token's support."""
    sampling_mask_token_ids: np.ndarray | None = None
    """`[sum(lengths)]` int32, vocabulary ids of all supports, one after the other."""
    sampling_mask_logprobs: np.ndarray | None = None
    """`[sum(lengths)]` float32, log-probabilities along `sampling_mask_token_ids` (support mode only)."""


def token_output_codecs(
    *,
    num_experts: int | None = None,
    num_layers: int | None = None,
    dense_layers: Collection[int] = (),
    index_topk: int | None = None,
    vocab_size: int | None = None,
) -> dict[str, Codec]:
    """Codecs for the fields of TokenOutputStash, for the writer of one model: `OutputStore(codecs=...)`.

    `num_experts`: routed experts a layer of the model (None: it has none); above 65535 they are stored raw.
    `num_layers`: decoder layers of the model, and `dense_layers`: those that never route, whose rows hold -1
    alone; without the former 256 experts take two bytes an id.
    `index_topk`: key positions that the model's sparse attention keeps (None: it has no indexer).
    `vocab_size`: ids that sampling masks may hold. Fields without a codec are stored raw.
    """
    codecs: dict[str, Codec] = {}
    if num_experts is not None and num_experts <= MAX_IDS:
        # Up to 255 experts a byte has room for -1 too.
        needs_room = num_experts == MAX_EXPERTS or bool(dense_layers)
        if needs_room and num_experts <= MAX_EXPERTS and num_layers is not None and num_layers <= MAX_LAYERS:
            codecs["routed_experts"] = ExpertsCodec(num_experts, num_layers, frozenset(dense_layers))
        else:
            codecs["routed_experts"] = NarrowCodec(num_experts)
    if index_topk is not None:
        codecs["indexer_topk"] = PositionBlocksCodec()
    if vocab_size is not None:
        codecs["sampling_mask_token_ids"] = DeltasCodec(vocab_size)
    return codecs
