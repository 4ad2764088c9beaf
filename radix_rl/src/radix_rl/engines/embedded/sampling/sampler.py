"""`Sampler`: next tokens of a batch, their log-probabilities, and the supports they were sampled from.

Order of the transforms, as in SGLang: penalties, minimum length, temperature, then top-k, top-p and min-p
together on the one distribution. A log-probability is that of the distribution sampled from: renormalised
over what the truncation kept. A greedy token's is that of the untruncated distribution at temperature 1; that
of its support, a single token, would be 0.
"""

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch

from radix_engine_plugins.logprobs import floored
from radix_rl.engines.embedded.sampling.batch import SamplingBatch
from radix_rl.types import LOGPROB_FLOOR

logger = logging.getLogger(__name__)

_DRAWN_AT_ONCE, _BLOCK = 4096, 256
"""Weights that are cumulated as they are; weights of a block, where there are more."""


@dataclass(frozen=True)
class Support:
    """What one token was sampled from, most likely first."""

    token_ids: np.ndarray
    """`[k]` int32."""
    logprobs: np.ndarray
    """`[k]` float32, renormalised: their exponentials sum to 1. The floor where they are not finite."""


@dataclass(frozen=True)
class Sampled:
    tokens: list[int]
    logprobs: list[float]
    supports: dict[int, Support]
    """By row, for the rows that asked for their sampling mask."""


class Sampler:
    def __init__(self) -> None:
        self.num_non_finite = 0
        """Log-probabilities that were replaced by the floor, since the start."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
        """`logits` `[rows, vocab]`, any float dtype; may be overwritten."""
        scores = self._transform(logits.float(), batch)
        uniforms = batch.next_uniforms()
        supports: dict[int, Support] = {}
        if not batch.truncated_rows:
            tokens, logprobs = self._plain(scores, batch, uniforms, batch.plain_rows, supports)
        elif not batch.plain_rows:
            tokens, logprobs = self._truncated(scores, batch, uniforms, batch.truncated_rows, supports)
        else:
            tokens = torch.empty(len(batch.sequences), dtype=torch.int64, device=scores.device)
            logprobs = torch.empty(len(batch.sequences), dtype=torch.float32, device=scores.device)
            for rows, draw in ((batch.plain_rows, self._plain), (batch.truncated_rows, self._truncated)):
                index = torch.tensor(rows, device=scores.device)
                tokens[index], logprobs[index] = draw(scores[index], batch, uniforms[index], rows, supports)
        batch.count(tokens)
        return Sampled(tokens.tolist(), self._finite(logprobs.tolist()), supports)

    def _transform(self, scores: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        if batch.has_penalties:
            seen = batch.output_counts > 0
            # As SGLang's overlap schedule: subtracting decides on which side of zero they are scaled.
            scores = scores - batch.frequency * batch.output_counts - batch.presence * seen
            repeated = torch.where(scores > 0, scores / batch.repetition, scores * batch.repetition)
            scores = torch.where(seen, repeated, scores)
        for row in batch.wants_minimum:
            sequence = batch.sequences[row]
            if (
                len(sequence.output_ids) < sequence.request.sampling.min_new_tokens
                and sequence.stop_token_ids
            ):
                scores[row, list(sequence.stop_token_ids)] = float("-inf")
        return scores if batch.unit_temperature else scores / batch.temperature[:, None]

    def _plain(
        self,
        scores: torch.Tensor,
        batch: SamplingBatch,
        uniforms: torch.Tensor,
        rows: list[int],
        supports: dict[int, Support],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that sample from the whole vocabulary, and greedy rows."""
        probs = scores.softmax(dim=-1)
        if batch.all_greedy:
            tokens = scores.argmax(dim=-1)
        else:
            tokens = _draw(probs, uniforms)
            if batch.any_greedy:
                tokens = torch.where(batch.greedy[rows], scores.argmax(dim=-1), tokens)
        if batch.any_mask:
            self._plain_supports(probs, tokens, batch, rows, supports)
        return tokens, probs.gather(1, tokens[:, None])[:, 0].log()

    def _plain_supports(
        self,
        probs: torch.Tensor,
        tokens: torch.Tensor,
        batch: SamplingBatch,
        rows: list[int],
        supports: dict[int, Support],
    ) -> None:
        for i, row in enumerate(rows):
            if not batch.wants_mask[row]:
                continue
            if batch.sequences[row].request.sampling.temperature == 0.0:
                supports[row] = Support(
                    np.array([int(tokens[i])], dtype=np.int32), np.zeros(1, dtype=np.float32)
                )
                continue
            ordered, ids = probs[i].sort(descending=True, stable=True)
            size = int((ordered > 0).sum())
            if size == 0:
                # Probabilities that are not finite rank nothing; what was sampled is in its support anyway.
                supports[row] = _support(tokens[i : i + 1], probs[i, tokens[i : i + 1]].log())
                continue
            supports[row] = _support(ids[:size], ordered[:size].log())

    def _truncated(
        self,
        scores: torch.Tensor,
        batch: SamplingBatch,
        uniforms: torch.Tensor,
        rows: list[int],
        supports: dict[int, Support],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.tensor(rows, device=scores.device)
        top_k, top_p, min_p = batch.top_k[index], batch.top_p[index], batch.min_p[index]
        probs = scores.softmax(dim=-1)
        # A full sort only where some row's support has no bound of its own.
        ordered, ids = probs.topk(int(top_k.max()), dim=-1)
        before = ordered.cumsum(dim=-1) - ordered
        ranks = torch.arange(ordered.shape[1], device=scores.device)
        keep = (
            (ranks < top_k[:, None])
            & (before <= top_p[:, None])
            & (ordered >= ordered[:, :1] * min_p[:, None])
        )
        keep &= ordered > 0
        keep[:, 0] = True
        sizes = keep.sum(dim=-1)
        # Each of the three rules keeps a prefix of the order, but a GPU's sums may rise unevenly.
        keep = ranks < sizes[:, None]
        kept = ordered.masked_fill(~keep, 0.0)
        logprobs = (kept / kept.sum(dim=-1, keepdim=True)).log()
        # Where no probability is finite the draw is anywhere.
        choice = torch.minimum(_draw(kept, uniforms), sizes - 1)[:, None]
        if batch.any_mask:
            for i, (row, size) in enumerate(zip(rows, sizes.tolist(), strict=True)):
                if batch.wants_mask[row]:
                    supports[row] = _support(ids[i, :size], logprobs[i, :size])
        return ids.gather(1, choice)[:, 0], logprobs.gather(1, choice)[:, 0]

    def _finite(self, logprobs: list[float]) -> list[float]:
        bad = sum(not math.isfinite(logprob) for logprob in logprobs)
        if not bad:
            return logprobs
        self.num_non_finite += bad
        logger.warning(
            "%d sampled tokens have a log-probability that is not finite; it is given as %s",
            bad,
            LOGPROB_FLOOR,
        )
        return [logprob if math.isfinite(logprob) else LOGPROB_FLOOR for logprob in logprobs]


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Where cumulated weights `[rows, k]` pass the share `uniforms` `[rows]` of their sum: int64 `[rows]`.

    Cumulated in float64, where no weight is lost beside the sum of a large vocabulary, and no share below 1
    reaches the sum: a weight of 0 is never drawn. Where the weights are not finite the draw is anywhere.
    """
    size = weights.shape[1]
    if size <= _DRAWN_AT_ONCE:
        cumulated = weights.cumsum(dim=-1, dtype=torch.float64)
        return _passing(cumulated, uniforms[:, None] * cumulated[:, -1:])[:, 0]
    # First a block, then a place in it: it takes several times as long to cumulate a large vocabulary as to
    # sum it.
    whole = size // _BLOCK * _BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=-1)
    if whole < size:
        sums = torch.cat((sums, weights[:, whole:].sum(dim=-1, keepdim=True)), dim=1)
    sums = sums.double()
    ends = sums.cumsum(dim=-1)
    shares = uniforms[:, None] * ends[:, -1:]
    block = _passing(ends, shares)
    places = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, places.clamp(max=size - 1)).masked_fill_(places >= size, 0.0)
    cumulated = inside.cumsum(dim=-1, dtype=torch.float64)
    # As a share of the block, since its float32 sum may differ from what its weights cumulate to.
    before = torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    left = (shares - before) / sums.gather(1, block) * cumulated[:, -1:]
    below_sum = torch.nextafter(cumulated[:, -1:], torch.zeros_like(left))
    return places.gather(1, _passing(cumulated, torch.minimum(left, below_sum)))[:, 0].clamp_(max=size - 1)


def _passing(cumulated: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Where each row passes its share: both `[rows, ...]`, returns int64 `[rows, 1]`."""
    return torch.searchsorted(cumulated, shares, right=True).clamp_(max=cumulated.shape[1] - 1)


def _support(token_ids: torch.Tensor, logprobs: torch.Tensor) -> Support:
    finite, _ = floored(logprobs.to(torch.float32).cpu().numpy().copy())
    return Support(token_ids.to(torch.int32).cpu().numpy().copy(), finite)
