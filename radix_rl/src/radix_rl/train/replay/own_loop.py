"""`ExpertReplay`: routing replay for a training loop of one's own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from radix_rl.errors import ReplayError
from radix_rl.train.batch import TrainBatch
from radix_rl.train.replay.counts import ReplayCounts
from radix_rl.train.replay.experts import RouterReplay
from radix_rl.train.replay.unrecorded import unrecorded_rows

NO_ROW = -1


class ExpertReplay:
    """Makes a mixture of experts route as an engine did. One thread, one batch at a time.

    Weights of the experts are computed from the model's own router scores, so that gradients reach the
    router. Outside of `batch` the model is as it was.
    """

    def __init__(self, model: PreTrainedModel, *, max_unrecorded_share: float = 0.0) -> None:
        """Find the model's routers. Raises ReplayError for a model whose routers are not known.

        `max_unrecorded_share` is the share of a batch's rows that may lack recorded experts and choose their
        own.
        """
        self._replay = RouterReplay(model)
        self._max_unrecorded_share = max_unrecorded_share
        self.counts = ReplayCounts()
        """Over all batches so far; `disagreeing` of `token_layers` would have been routed otherwise."""

    @contextmanager
    def batch(
        self, input_ids_bt: torch.Tensor, routed_experts: Sequence[np.ndarray]
    ) -> Iterator[Callable[[], None]]:
        """Replay within the block, which holds one forward pass and its backward pass.

        `input_ids_bt`: `[b, t]`, sequences padded on the right, without an attention mask. `routed_experts`:
        for each sequence of N tokens `[N - 1, layers, top_k]` of an integer type, row i = the experts of
        token i; layers count over the whole model, and one without a router holds -1.

        Yields a function to call between forward and backward pass: it raises ReplayError unless every router
        was called once, and recomputation (gradient checkpointing) may come after it. Raises ReplayError for
        rows that do not fit the model.
        """
        batch = _batch_of(input_ids_bt, routed_experts)
        self._check_unrecorded(routed_experts)
        with self._replay.microbatch(batch, self.counts) as bound:
            yield bound.forward_finished

    def _check_unrecorded(self, routed_experts: Sequence[np.ndarray]) -> None:
        unrecorded = sum(map(unrecorded_rows, routed_experts))
        num_rows = sum(map(len, routed_experts))
        if unrecorded > self._max_unrecorded_share * num_rows:
            raise ReplayError(
                f"{unrecorded} of {num_rows} token rows have no recorded experts, more than "
                f"max_unrecorded_share={self._max_unrecorded_share} allows"
            )


def _batch_of(input_ids_bt: torch.Tensor, routed_experts: Sequence[np.ndarray]) -> TrainBatch:
    num_sequences, width = input_ids_bt.shape
    if len(routed_experts) != num_sequences:
        raise ReplayError(
            f"expected the routed experts of {num_sequences} sequences, got those of {len(routed_experts)}"
        )
    shapes = {rows.shape[1:] for rows in routed_experts}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2 or max(map(len, routed_experts)) > width - 1:
        raise ReplayError(
            f"expected routed experts of shape [at most {width - 1}, layers, top_k], layers and top_k the "
            f"same for all sequences, got {[rows.shape for rows in routed_experts]}"
        )
    padded = np.full((num_sequences, width, *routed_experts[0].shape[1:]), NO_ROW, dtype=np.int32)
    for row, rows in enumerate(routed_experts):
        padded[row, : len(rows)] = rows
    device = input_ids_bt.device
    lengths_b = torch.tensor([len(rows) + 1 for rows in routed_experts], device=device)
    nothing_bt = torch.zeros(num_sequences, width, device=device)
    return TrainBatch(
        names=tuple(f"number {row}" for row in range(num_sequences)),
        input_ids_bt=input_ids_bt,
        lengths_b=lengths_b,
        # Which of them count is the caller's to know: every row may be needed.
        loss_mask_bt=(torch.arange(width, device=device) < lengths_b[:, None]).float(),
        rollout_logprobs_bt=nothing_bt,
        advantages_bt=nothing_bt,
        loss_scale_bt=nothing_bt,
        routed_experts_btlk=torch.from_numpy(padded).to(device),
    )
