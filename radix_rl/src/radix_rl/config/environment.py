"""`[environment]`: the problems to solve and how answers are scored."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from radix_rl.config.base import Section


class ArithmeticEnvironmentConfig(Section):
    """Word problems with sums, generated as needed."""

    type: Literal["arithmetic"] = "arithmetic"
    max_operand: int = Field(default=99, ge=1)
    """Operands are drawn from 0 to this number."""
    num_eval_problems: int = Field(default=256, ge=1)
    """Held-out problems; none of them is a training problem."""


class Gsm8kEnvironmentConfig(Section):
    """Grade-school mathematics, scored by the exact final number."""

    type: Literal["gsm8k"] = "gsm8k"
    train_path: Path
    """JSONL file with "question" and "answer" on every line."""
    test_path: Path
    """Held-out problems in the same format."""
    system_prompt: str | None = None
    """Instruction put before each question, through the tokenizer's chat template."""


EnvironmentConfig = Annotated[
    ArithmeticEnvironmentConfig | Gsm8kEnvironmentConfig, Field(discriminator="type")
]
