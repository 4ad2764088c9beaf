"""`[algorithm]`: advantages, policy loss, KL penalty and rollout correction."""

from typing import Annotated, Literal, Self

from pydantic import Field, Tag, model_validator

from radix_rl.config.base import Section, variant_by_type


class PpoClipLossConfig(Section):
    """Clipped surrogate of PPO."""

    type: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """With negative advantage the loss is bounded by dual_clip times it. Unset: not bounded."""


class DapoLossConfig(Section):
    """PPO clip with DAPO's higher upper bound (clip-higher)."""

    type: Literal["dapo"] = "dapo"
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """With negative advantage the loss is bounded by dual_clip times it. Unset: not bounded."""


class GspoLossConfig(Section):
    """Clipped surrogate on the sequence's length-normalised ratio."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0, lt=1)
    clip_high: float = Field(default=4e-4, ge=0)


class CispoLossConfig(Section):
    """Policy gradient weighted by the clipped, detached ratio: no token loses its gradient."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """The weight is clipped below at 1 - clip_low; 1 is no lower bound."""
    clip_high: float = Field(default=4.0, ge=0)
    """The weight is clipped above at 1 + clip_high."""


LossConfig = Annotated[
    Annotated[PpoClipLossConfig, Tag("ppo_clip")]
    | Annotated[DapoLossConfig, Tag("dapo")]
    | Annotated[GspoLossConfig, Tag("gspo")]
    | Annotated[CispoLossConfig, Tag("cispo")],
    variant_by_type("ppo_clip"),
]


class NoCorrectionConfig(Section):
    """The difference between rollout and trainer is not corrected."""

    type: Literal["none"] = "none"


class TruncatedCorrectionConfig(Section):
    """Weights exp(trainer - rollout) of the policy before the step, truncated at `high`."""

    type: Literal["truncated"] = "truncated"
    level: Literal["token", "sequence"] = "token"
    high: float = Field(default=2.0, gt=0)


class MaskedCorrectionConfig(Section):
    """Those weights, and zero where they leave [low, high]."""

    type: Literal["masked"] = "masked"
    level: Literal["token", "sequence"] = "token"
    low: float = Field(default=0.5, ge=0)
    high: float = Field(default=2.0, gt=0)

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"expected low <= high, got low {self.low} and high {self.high}")
        return self


CorrectionConfig = Annotated[
    Annotated[NoCorrectionConfig, Tag("none")]
    | Annotated[TruncatedCorrectionConfig, Tag("truncated")]
    | Annotated[MaskedCorrectionConfig, Tag("masked")],
    variant_by_type("none"),
]


class AlgorithmConfig(Section):
    """How rewards become a loss."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    loss: LossConfig = PpoClipLossConfig()
    reduction: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """token_mean: over all response tokens of a minibatch. sequence_mean: over each response, then over
    responses. constant: token sums over responses times max_new_tokens, as Dr.GRPO does."""
    old_logprobs: Literal["recomputed", "rollout"] = "recomputed"
    """Denominator of the importance ratio: the trainer's own values before the step, or the engine's."""
    correction: CorrectionConfig = NoCorrectionConfig()
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty (k3) to the initial model. 0: no reference model is kept."""

    @model_validator(mode="after")
    def _one_correction(self) -> Self:
        if self.old_logprobs == "rollout" and self.correction.type != "none":
            raise ValueError(
                'old_logprobs "rollout" has the engine in the denominator of the ratio already, so that a '
                "correction "
                'corrects twice; set algorithm.correction.type="none" or algorithm.old_logprobs="recomputed"'
            )
        return self
