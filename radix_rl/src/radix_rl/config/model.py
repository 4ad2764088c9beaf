"""`[model]`: which model is trained."""

from typing import Literal

from radix_rl.config.base import FilePath, Section


class ModelConfig(Section):
    """The policy: a causal language model in Hugging Face format."""

    path: FilePath
    """Directory with config.json, safetensors and tokenizer files."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of the trainer's model."""
    experts: Literal["eager", "batched_mm", "grouped_mm"] = "grouped_mm"
    """Expert implementation of the trainer's model; a dense model ignores it."""
