"""`Sample`: one sequence on its way from rollout to trainer."""

from typing import Any

import msgspec

from radix_rl.rollout.replay_index import ReplayIndex
from radix_rl.types import FinishReason, VersionSpan


class Sample(msgspec.Struct, kw_only=True, eq=False):
    """N tokens: the first `prompt_tokens` are context, the other C = N - prompt_tokens are the response."""

    group_id: int
    """Samples of one prompt share it; advantages are computed over a group."""
    index: int
    """Position in its group."""
    tokens: list[int]
    prompt_tokens: int
    loss_mask: list[int]
    """`[C]` 1 for tokens the policy sampled, 0 for injected ones (tools, environment)."""
    rollout_logprobs: list[float]
    """`[C]` under the distribution sampled from; 0.0 where loss_mask is 0."""
    version_spans: list[VersionSpan]
    finish_reason: FinishReason
    replay: ReplayIndex
    reward: float | None = None
    metadata: dict[str, Any] = {}

    def truncate(self, max_tokens: int) -> None:
        """Cut tokens, masks, log-probabilities, spans and every replay field together. The one place that cuts."""
        raise NotImplementedError
