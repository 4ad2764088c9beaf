"""`[engine]`: what generates the rollouts."""

from typing import Annotated, Literal

from pydantic import Field, Tag

from radix_rl.config.base import Section, variant_by_type


class EmbeddedEngineConfig(Section):
    """The engine of this package, in the trainer's process."""

    type: Literal["embedded"] = "embedded"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of weights and activations; new weights are cast to it."""
    device: str = "cpu"
    """torch device, such as "cpu" or "cuda:0"."""
    max_running_requests: int = Field(default=64, ge=1)
    """Requests that decode in one batch; others wait."""
    kv_cache_tokens: int = Field(default=16384, ge=1)
    """Tokens that the preallocated key-value cache holds, over all running requests."""
    context_length: int | None = Field(default=None, ge=2)
    """Prompt plus output tokens of one request. Unset: the model's own."""
    prefix_cache_tokens: int = Field(default=0, ge=0)
    """Tokens of prompts and answers kept for requests that begin with them: the samples of one prompt, the
    turns of a session. 0: none."""


class RemoteEngineConfig(Section):
    """One or more running HTTP servers that speak SGLang's API."""

    type: Literal["remote"] = "remote"
    urls: tuple[str, ...] = Field(min_length=1)
    """Base URLs, such as "http://10.0.0.1:30000"; requests go to the least loaded."""
    api_key_env: str | None = None
    """Environment variable with the key for generation."""
    admin_api_key_env: str | None = None
    """Environment variable with the key for weight updates and other control routes."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one request, retries included."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """How long a server may take until it answers /health."""


EngineConfig = Annotated[
    Annotated[EmbeddedEngineConfig, Tag("embedded")] | Annotated[RemoteEngineConfig, Tag("remote")],
    variant_by_type("embedded"),
]
