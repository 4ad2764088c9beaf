"""`[rollout]`: how many samples a step generates, and how."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from radix_rl.config.base import Section


class SamplingConfig(Section):
    """Sampling of the policy.

    The trainer applies the same temperature, top-k, top-p and min-p to its logits.
    """

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy, for evaluation only."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """-1: the whole vocabulary; else at least 1."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    max_new_tokens: int = Field(default=128, ge=1)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Token ids that end a response, besides the model's own end-of-sequence ids."""

    @property
    def truncates(self) -> bool:
        """Whether a token may be impossible that the model gives a probability."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @model_validator(mode="after")
    def _top_k_keeps_a_token(self) -> Self:
        if self.top_k == 0:
            raise ValueError("top_k: expected -1 (the whole vocabulary) or at least 1, got 0")
        return self


class DynamicSamplingConfig(Section):
    """Replace groups whose rewards are all equal: they teach nothing."""

    enabled: bool = False
    max_rounds: int = Field(default=4, ge=1)
    """Rounds of generation in a step, the first included; then the step trains on the groups it has."""


class RewardConfig(Section):
    """How answers are scored: in threads beside generation."""

    timeout_s: float = Field(default=60.0, gt=0)
    """For one score. A thread cannot be ended: one that takes longer goes on and is not waited for."""
    max_concurrent: int = Field(default=16, ge=1)
    """Scores at a time."""
    max_failed: int = Field(default=4, ge=0)
    """Scores of one rollout or evaluation that may fail: raise, take too long, or give no finite number. They
    are logged and count as 0. One more ends the run."""


class RolloutConfig(Section):
    """One step's rollout: `prompts_per_step` groups of `samples_per_prompt` samples."""

    prompts_per_step: int = Field(default=32, ge=1)
    samples_per_prompt: int = Field(default=8, ge=1)
    max_concurrent_requests: int = Field(default=256, ge=1)
    """Requests in flight, over all servers. The embedded engine takes all and queues them itself."""
    max_sample_tokens: int | None = Field(default=None, ge=2)
    """Prompt plus response tokens kept of a sample; the rest is cut. Unset: nothing is cut."""
    sampling: SamplingConfig = SamplingConfig()
    rewards: RewardConfig = RewardConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0 (greedy), which gives every sample of a group the same answer; "
                "set it above 0"
            )
        return self
