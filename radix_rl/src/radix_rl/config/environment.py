"""`[environment]`: the problems to solve and how answers are scored."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from radix_rl.config.base import FilePath, Section


class ArithmeticEnvironmentConfig(Section):
    """Word problems with sums, generated as needed."""

    type: Literal["arithmetic"] = "arithmetic"
    max_operand: int = Field(default=99, ge=29)
    """Operands are drawn from 10 to this number."""
    carry_share: float | None = Field(default=None, ge=0, le=1)
    """Share of problems whose last digits add up to 10 or more. Unset: as they come, a little under a
    half."""
    num_eval_problems: int = Field(default=256, ge=1)
    """Held-out problems; none of them is a training problem."""


class Gsm8kEnvironmentConfig(Section):
    """Grade-school mathematics, scored by the exact final number."""

    type: Literal["gsm8k"] = "gsm8k"
    train_path: FilePath | None = None
    """JSONL file with "question" and "answer" on every line."""
    test_path: FilePath | None = None
    """Held-out problems in the same format."""
    hub_dataset: str | None = None
    """Name on the model hub, such as "openai/gsm8k", in place of the two paths; needs the extra `hub`."""
    system_prompt: str | None = None
    """Instruction put before each question, through the tokenizer's chat template."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        paths = (self.train_path is not None) + (self.test_path is not None)
        if paths != (0 if self.hub_dataset is not None else 2):
            raise ValueError("expected train_path and test_path, or hub_dataset instead of them")
        return self


EnvironmentConfig = Annotated[
    ArithmeticEnvironmentConfig | Gsm8kEnvironmentConfig, Field(discriminator="type")
]
