"""`SamplingBatch`: the sampling parameters of a batch as tensors, built again only when the batch changes."""

from collections.abc import Sequence as Rows

import numpy as np
import torch

from radix_rl.engines.embedded.sampling.uniform import uniform
from radix_rl.engines.embedded.schedule.sequence import Sequence

_SEED_MASK = (1 << 64) - 1
_TOKENS_AHEAD = 16
"""Random numbers are drawn for so many tokens at once."""


class SamplingBatch:
    """One row a sequence; all tensors `[rows]` on the logits' device."""

    def __init__(self, sequences: Rows[Sequence], vocab_size: int, device: torch.device) -> None:
        self.sequences = list(sequences)
        params = [sequence.request.sampling for sequence in sequences]
        self.vocab_size = vocab_size
        self.device = device
        self._seeds = np.array([sequence.seed & _SEED_MASK for sequence in sequences], dtype=np.uint64)
        self._uniforms: list[torch.Tensor] = []
        greedy = [p.temperature == 0.0 for p in params]
        self.greedy = torch.tensor(greedy, device=device)
        self.all_greedy = all(greedy)
        self.any_greedy = any(greedy)
        temperatures = [1.0 if p.temperature == 0.0 else p.temperature for p in params]
        self.temperature = torch.tensor(temperatures, dtype=torch.float32, device=device)
        self.unit_temperature = all(t == 1.0 for t in temperatures)
        top_k = [vocab_size if p.top_k < 1 else min(p.top_k, vocab_size) for p in params]
        self.top_k = torch.tensor(top_k, device=device)
        self.top_p = torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device)
        self.min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
        truncated = [
            not g and (k < vocab_size or p.top_p < 1.0 or p.min_p > 0.0)
            for g, k, p in zip(greedy, top_k, params, strict=True)
        ]
        self.truncated_rows = [i for i, flag in enumerate(truncated) if flag]
        self.plain_rows = [i for i, flag in enumerate(truncated) if not flag]
        self.wants_mask = [sequence.request.return_sampling_mask for sequence in sequences]
        self.any_mask = any(self.wants_mask)
        self.wants_minimum = [i for i, p in enumerate(params) if p.min_new_tokens > 0]
        self._set_penalties()

    def _set_penalties(self) -> None:
        params = [sequence.request.sampling for sequence in self.sequences]
        self.has_penalties = any(
            p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0 for p in params
        )
        if not self.has_penalties:
            return

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=self.device)[:, None]

        self.frequency = column([p.frequency_penalty for p in params])
        self.presence = column([p.presence_penalty for p in params])
        self.repetition = column([p.repetition_penalty for p in params])
        counts = [np.bincount(s.output_ids, minlength=self.vocab_size) for s in self.sequences]
        self.output_counts = torch.from_numpy(np.stack(counts)).to(self.device, torch.float32)

    def matches(self, sequences: Rows[Sequence]) -> bool:
        return self.sequences == list(sequences)

    def next_uniforms(self) -> torch.Tensor:
        """Random numbers for each row's next token, float64 `[rows]`.

        From call to call every sequence gains one token, the one sampled with them.
        """
        if not self._uniforms:
            positions = np.array([sequence.num_tokens for sequence in self.sequences], dtype=np.uint64)
            ahead = positions + np.arange(_TOKENS_AHEAD - 1, -1, -1, dtype=np.uint64)[:, None]
            drawn = torch.from_numpy(uniform(self._seeds, ahead))
            self._uniforms = list(drawn.to(self.device).unbind())
        return self._uniforms.pop()

    def count(self, tokens: torch.Tensor) -> None:
        """Take note of the tokens just sampled, `[rows]`."""
        if self.has_penalties:
            self.output_counts.scatter_add_(
                1, tokens[:, None], torch.ones_like(tokens[:, None], dtype=torch.float32)
            )
