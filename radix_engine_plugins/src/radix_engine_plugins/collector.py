"""`TokenOutputCollector`: the replay outputs of one request while it runs."""

import numpy as np
from radix_transfer_plugins import TokenOutputStash


class TokenOutputCollector:
    """Grows by whole rows as forward passes finish; owned by the request, used by one thread at a time.

    What was asked for at construction is in the stash even with zero rows; what was not asked for is None.
    """

    def __init__(
        self,
        *,
        routed_experts_shape: tuple[int, int] | None = None,
        indexer_topk_shape: tuple[int, int] | None = None,
        sampling_mask: bool = False,
        sampling_mask_logprobs: bool = False,
        start_row: int = 0,
    ) -> None:
        """`*_shape` is `(layers, top_k)`. Rows below `start_row` (absolute) are dropped as they are added."""
        raise NotImplementedError

    def add_routed_experts(self, rows: np.ndarray) -> None:
        """`[n, layers, top_k]` int32, the next n rows."""
        raise NotImplementedError

    def add_indexer_topk(self, rows: np.ndarray) -> None:
        """`[n, indexer_layers, index_topk]` int32, the next n rows."""
        raise NotImplementedError

    def add_sampling_mask(self, token_ids: np.ndarray, logprobs: np.ndarray | None = None) -> None:
        """Support of the next output token: `[k]` int32, `[k]` float32."""
        raise NotImplementedError

    def to_stash(self, num_tokens_forwarded: int) -> TokenOutputStash:
        """Exactly the rows [start_row, num_tokens_forwarded). ValueError if fewer were collected: rows are never padded."""
        raise NotImplementedError

    def start_rows(self) -> dict[str, int]:
        """For `OutputStore.put_many(start_rows=[...])`."""
        raise NotImplementedError
