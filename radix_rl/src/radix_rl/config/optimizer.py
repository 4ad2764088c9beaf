"""`[optimizer]`: AdamW and its learning-rate schedule."""

from typing import Literal, Self

from pydantic import Field, model_validator

from radix_rl.config.base import Section


class OptimizerConfig(Section):
    """AdamW."""

    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm over all parameters."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, until the last step."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of `lr` that a linear or cosine schedule goes down to, one step after the last."""

    @model_validator(mode="after")
    def _betas_forget(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: expected two numbers in [0, 1), got {list(self.betas)!r}")
        return self
