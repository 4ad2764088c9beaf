"""`[train]`: the training step."""

from typing import Literal

from pydantic import Field

from radix_rl.config.base import Device, Section


class TrainConfig(Section):
    """The trainer's ranks and what they do in a step."""

    steps: int = Field(ge=1)
    """Steps of generate, score, train, sync."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps on one rollout."""
    microbatch_tokens: int = Field(default=8192, ge=1)
    """Tokens, padding included, of one forward and backward pass of a rank; a longer sample has a pass of
    its own."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trainer's weights and activations. In bfloat16, updates below a weight's rounding (1 part in
    256) are lost."""
    device: Device = "cpu"
    """torch device, such as "cpu" or "cuda"."""
    num_ranks: int = Field(default=1, ge=1, le=1024)
    """1: in this process. More: FSDP2 over that many processes."""
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of a rank. Unset: torch's choice."""
    gradient_checkpointing: bool = False
    replay_routed_experts: bool = True
    """Route as the engine did; a dense model must switch it off."""
    replay_indexer_topk: bool = False
    """Keep the positions that the engine's sparse attention kept (DeepSeek-V3.2, GLM-MoE-DSA)."""
    replay_sampling_mask: bool = True
    """Where sampling truncates (top_k, top_p, min_p): take the vocabulary that survived in the engine. Off:
    the trainer truncates its own distribution, which differs at the edge."""
    max_unrecorded_share: float = Field(default=0.0, ge=0, le=1)
    """Share of a step's token rows (a sample's last token left out) that may lack recorded experts or
    positions, and choose live."""
    mismatch_without_replay_every_steps: int = Field(default=0, ge=0)
    """One extra forward pass without replay on every so many steps, to measure what replay gains. 0:
    never."""
