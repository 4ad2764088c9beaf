"""`Sequence`: one request on its way through the engine.

Owned by the worker thread from submission to finish.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from radix_rl.types import FinishReason, GenerateRequest, VersionSpan


class SequenceState(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """P prompt tokens, C output tokens so far."""

    request: GenerateRequest
    seed: int
    stop_token_ids: frozenset[int]
    """Tokens that end the answer: the model's end tokens and the request's own, unless they are ignored."""
    on_finish: "Callable[[Sequence], None]"
    """Called once on the worker thread, after finish_reason or error was set and `rows` were taken out."""
    on_tokens: "Callable[[Sequence], None] | None" = None
    """Called on the worker thread after each step that added tokens."""
    state: SequenceState = SequenceState.WAITING
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    computed: int = 0
    """Tokens whose keys and values lie in the slot."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache when the request was first admitted."""
    num_retractions: int = 0
    version_spans: list[VersionSpan] = field(default_factory=list)
    """Closed spans; the last one is open until the weights change or the request ends."""
    cache_version: str | None = None
    """Weight version that computed all of the slot; None once two versions did."""
    saved_rows: dict[str, np.ndarray] = field(default_factory=dict)
    """`rows` from before a retraction: they stay paired with the log-probabilities of their forward pass."""
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    """Replay rows by field, `[rows, layers, top_k]` int32 from the request's `routed_experts_start_len` on.

    Set when the sequence finishes; memory of their own, which the answer hands on."""
    mask_ids: list[np.ndarray] = field(default_factory=list)
    """Support of each output token, `[k]` int32."""
    mask_logprobs: list[np.ndarray] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    wanted_rows: frozenset[str] = field(init=False)
    """Fields of TokenOutputStash whose replay rows the request asks for."""

    def __post_init__(self) -> None:
        asked = {
            "routed_experts": self.request.return_routed_experts,
            "indexer_topk": self.request.return_indexer_topk,
        }
        self.wanted_rows = frozenset(name for name, wanted in asked.items() if wanted)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.input_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.request.input_ids) + len(self.output_ids)

    @property
    def reserved_tokens(self) -> int:
        """Tokens of cache that the longest possible answer takes.

        The last sampled token never goes through the model.
        """
        return self.prompt_tokens + max(self.request.sampling.max_new_tokens - 1, 0)

    def token_range(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output."""
        prompt = self.request.input_ids
        if end <= len(prompt):
            return list(prompt[start:end])
        return [*prompt[start:], *self.output_ids[max(start - len(prompt), 0) : end - len(prompt)]]

    def close_span(self, version: str) -> None:
        """Output tokens since the last closed span were sampled under `version`."""
        start = self.version_spans[-1].end if self.version_spans else 0
        if len(self.output_ids) > start:
            self.version_spans.append(VersionSpan(start, len(self.output_ids), version))
