"""`[engine]`: what generates the rollouts. `radix-rl serve` makes its options of the same classes."""

from typing import Annotated, Literal

from pydantic import Field, Tag, field_validator

from radix_rl.config.base import DeviceOrAuto, Section, TokenCount, variant_by_type
from radix_rl.config.urls import check_base_url


class EmbeddedEngineConfig(Section):
    """The engine of this package, in the trainer's process or behind `radix-rl serve`."""

    type: Literal["embedded"] = "embedded"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of weights, activations and cache; new weights are cast to it. auto: what the checkpoint was saved
    in."""
    device: DeviceOrAuto = "auto"
    """torch device, such as "cpu" or "cuda:0". auto: the first GPU, else the CPU."""
    max_running_requests: int = Field(default=64, ge=1, le=1 << 16)
    """Requests that decode in one batch; others wait."""
    kv_cache_tokens: TokenCount = Field(default=65536, ge=16)
    """Tokens that the preallocated key-value cache holds. Running requests share it in equal shares, each as
    large as the largest request (prompt plus max_new_tokens) among them."""
    context_length: TokenCount | None = Field(default=None, ge=2)
    """Prompt plus output tokens of one request. Unset: the model's own, or kv_cache_tokens where that is
    less."""
    chunked_prefill_tokens: TokenCount = Field(default=2048, ge=16)
    """Prompt tokens that go through the model in one step, beside one token of each request that decodes."""
    prefix_cache_tokens: TokenCount = Field(default=0, ge=0)
    """Tokens of prompts and answers kept for requests that begin with them, in memory of their own: the
    samples of one prompt, the turns of a session. 0: none."""
    shortcuts: Literal["auto", "off"] = "auto"
    """Faster ways through the model's modules (docs/engine-embedded.md). auto: on a CPU, for a model that the
    engine loads itself; a model object that is passed to it never gets any."""
    sampling_mask_max_tokens: int = Field(default=4096, ge=1)
    """Ids that the sampling mask of a token may hold, as in SGLang: a request for masks needs a top_k of at
    most this. A mask without a bound has the whole vocabulary where the model is unsure."""
    experts_implementation: Literal["eager", "batched_mm", "grouped_mm"] | None = None
    """How transformers multiplies by experts. Unset: by a function of the engine's own where shortcuts
    are taken, and by transformers' choice elsewhere."""
    bfloat16_products: Literal["auto", "native", "float32"] = "auto"
    """How a CPU multiplies bfloat16 matrices. float32: through float32 copies of the weights, rounded
    afterwards; several times faster on a CPU without bfloat16 instructions, where auto chooses it."""


class RemoteSettings(Section):
    """How the client talks to one server."""

    connect_timeout_s: float = Field(default=5.0, gt=0)
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one request, retries included."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """How long a server may take until it answers /health."""
    num_layers: int | None = Field(default=None, ge=1)
    """Layers of inline routed experts, for a server whose /model_info does not tell them."""
    experts_per_token: int | None = Field(default=None, ge=1)
    """Experts of a token in inline routed experts, for a server whose /model_info does not tell them."""


class RemoteEngineConfig(RemoteSettings):
    """One or more running HTTP servers that speak SGLang's API."""

    type: Literal["remote"] = "remote"
    urls: tuple[str, ...] = Field(min_length=1)
    """Base URLs, such as "http://10.0.0.1:30000"; requests go to the least loaded."""
    api_key_env: str | None = None
    """Environment variable with the key for generation."""
    admin_api_key_env: str | None = None
    """Environment variable with the key for weight updates and other control routes."""

    @field_validator("urls")
    @classmethod
    def _are_base_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        checked = tuple(check_base_url(url) for url in urls)
        if repeated := [url for url in dict.fromkeys(checked) if checked.count(url) > 1]:
            raise ValueError(f"expected each server once, got {repeated[0]!r} more than once")
        return checked


EngineConfig = Annotated[
    Annotated[EmbeddedEngineConfig, Tag("embedded")] | Annotated[RemoteEngineConfig, Tag("remote")],
    variant_by_type("embedded"),
]
