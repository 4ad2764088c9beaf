"""The arrays of one completion, and the stash made of them.

vLLM sends a completion's rows to the front end in chunks, as it sends tokens, and gathers them there. Here
they are joined once, on a thread of the store.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radix_transfer_plugins import TokenOutputStash


@dataclass
class TakenOutputs:
    """Placeholder for the rows of a `CompletionOutput`, which owns it.

    It is the one value that survives when vLLM merges chunks of a stream.
    """

    num_tokens: int
    """Of the prompt and the output."""
    num_output_tokens: int
    start_row: int
    """Absolute row of the first one."""
    rows: list[np.ndarray] = field(default_factory=list)
    """`[n, layers, top_k]` uint8 or uint16 each, in order."""
    masks: list[Any] = field(default_factory=list)
    """vLLM's `SamplingMaskLists` of one or more output tokens each, in order."""
    without_output: bool = False
    """The one output token is not part of the answer."""

    def to_stash(
        self, *, routing_layers: Sequence[int] | None, sampling_mask: bool
    ) -> tuple[TokenOutputStash, dict[str, int]]:
        """The stash and its start rows.

        `routing_layers` is None if rows were not captured. Raises ValueError.
        """
        fields: dict[str, np.ndarray] = {}
        if routing_layers is not None:
            fields["routed_experts"] = self._experts(routing_layers)
        if sampling_mask:
            fields["sampling_mask_lengths"], fields["sampling_mask_token_ids"] = self._mask()
        start_rows = {"routed_experts": self.start_row} if routing_layers is not None else {}
        return TokenOutputStash(**fields), start_rows

    def _experts(self, routing_layers: Sequence[int]) -> np.ndarray:
        expected = self.num_tokens - 1 - self.start_row
        captured = sum(len(chunk) for chunk in self.rows)
        if not self.rows or captured != expected:
            raise ValueError(
                f"routed_experts: rows [{self.start_row}, {self.num_tokens - 1}) are needed, vLLM gave "
                f"{captured}; rows are never padded"
            )
        rows = np.concatenate(self.rows).astype(np.int32)
        others = sorted(set(range(rows.shape[1])) - set(routing_layers))
        if others:
            rows[:, others, :] = -1
        return rows

    def _mask(self) -> tuple[np.ndarray, np.ndarray]:
        if self.without_output:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        lengths = [
            np.array([len(mask.token_ids)]) if mask.offsets is None else np.diff(mask.offsets)
            for mask in self.masks
        ]
        joined = np.concatenate([np.empty(0, np.int32), *lengths]).astype(np.int32)
        if len(joined) != self.num_output_tokens:
            raise ValueError(
                f"sampling mask: {self.num_output_tokens} output tokens, but vLLM gave {len(joined)} supports"
            )
        ids = np.concatenate([np.empty(0, np.int32), *(mask.token_ids for mask in self.masks)])
        return joined, ids.astype(np.int32)
