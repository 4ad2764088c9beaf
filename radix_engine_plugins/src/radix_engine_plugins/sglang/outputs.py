"""What has arrived of one request's outputs, and the stash made of it.

SGLang gathers a request's rows itself and sends them whole when it ends, and masks as CSR chunks of many
tokens, so there is nothing here to grow row by row: arrays are joined once, on a thread of the store.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from radix_engine_plugins.sglang.wire import PackedRows, unpack_rows
from radix_transfer_plugins import TokenOutputStash
from radix_transfer_plugins.codecs.base import Codec
from radix_transfer_plugins.codecs.raw import RawCodec

_ATTRIBUTE = "radix_outputs"


class MaskChunk(NamedTuple):
    """Supports of some output tokens in order, row after row."""

    lengths: np.ndarray
    """`[rows]` int32."""
    token_ids: np.ndarray
    """`[sum of lengths]` int32."""
    logprobs: np.ndarray
    """Float32, all finite: `[sum of lengths]` in support mode, `[rows]` in selected mode."""


@dataclass
class RequestOutputs:
    """Replay outputs of one request that have arrived.

    Owned by the request's ReqState; filled by the tokenizer's receive loop, read after the last output came.
    """

    rows: dict[str, PackedRows] = field(default_factory=dict)
    """By field of TokenOutputStash."""
    masks: list[MaskChunk] = field(default_factory=list)
    """In order, of requests that store them."""
    selected_logprobs: list[float] = field(default_factory=list)
    """Of each sampled token, picked from its support (support mode)."""
    error: str | None = None

    def to_stash(
        self, experts_codec: Codec, mask_mode: str | None
    ) -> tuple[TokenOutputStash, dict[str, int]]:
        """The stash and its start rows.

        `mask_mode`: "selected", "support" or None for no mask. Raises ValueError.
        """
        if self.error is not None:
            raise ValueError(self.error)
        fields: dict[str, np.ndarray] = {}
        for name, packed in self.rows.items():
            if packed.error is not None:
                raise ValueError(f"{name}: {packed.error}")
            fields[name] = unpack_rows(experts_codec if name == "routed_experts" else RawCodec(), packed)
        if mask_mode is not None:
            fields["sampling_mask_lengths"] = _joined([chunk.lengths for chunk in self.masks], np.int32)
            fields["sampling_mask_token_ids"] = _joined([chunk.token_ids for chunk in self.masks], np.int32)
        if mask_mode == "support":
            fields["sampling_mask_logprobs"] = _joined([chunk.logprobs for chunk in self.masks], np.float32)
        return TokenOutputStash(**fields), {name: packed.start_row for name, packed in self.rows.items()}


def outputs_of(state: Any) -> RequestOutputs:
    """Of a tokenizer's ReqState, made when first asked for."""
    return state.__dict__.setdefault(_ATTRIBUTE, RequestOutputs())


def _joined(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *parts])
