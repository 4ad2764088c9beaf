"""`EmbeddedEngineConfig`: everything the embedded engine can be told."""

from typing import Any, Literal

from pydantic import Field

from radix_rl.config.base import Section


class OutputStoreTarget(Section):
    """The store that replay outputs are written to."""

    backend: str
    """Registered backend name, such as "memory", "shared_memory" or "mooncake"."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The backend's own settings, key prefix included."""
    max_concurrent_puts: int = Field(default=4, ge=1)


class EmbeddedEngineConfig(Section):
    """One engine, one model, one process."""

    model_path: str | None = None
    """Folder of a Hugging Face checkpoint, or of a GGUF file (see `gguf_file`). None: the model is passed as
    an object.
    """
    gguf_file: str | None = None
    """File name below `model_path`; its weights are unpacked to `dtype`."""
    tokenizer_path: str | None = None
    """Unset: `model_path`. A model without tokenizer files runs, but knows no stop strings."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of weights, activations and cache; new weights are cast to it. "auto": what the checkpoint was saved
    in.
    """
    device: str = "cpu"
    """torch device, such as "cpu" or "cuda:0"."""
    max_running_requests: int = Field(default=64, ge=1)
    """Requests in the running batch; others wait."""
    kv_cache_tokens: int = Field(default=65536, ge=16)
    """Tokens that the preallocated key-value cache holds. Running requests share it in equal shares, each as
    large as the largest request (prompt plus max_new_tokens) among them."""
    prefix_cache_tokens: int = Field(default=0, ge=0)
    """Tokens of finished or prefilled prompts kept for reuse, in memory of their own. 0: no prefix cache."""
    chunked_prefill_tokens: int = Field(default=2048, ge=16)
    """Prompt tokens that go through the model in one step, beside one token of each request that decodes."""
    context_length: int | None = Field(default=None, ge=2)
    """Prompt plus output tokens of one request. Unset: the model's own, or `kv_cache_tokens` where that is
    less.
    """
    enable_return_routed_experts: bool = False
    """Capture the experts that each token was routed to. Refused for a model without routers that are
    known.
    """
    enable_return_indexer_topk: bool = False
    """Capture the key positions that sparse attention kept. Refused for a model without a known indexer."""
    output_store: OutputStoreTarget | None = None
    """None: requests that ask for the store are refused."""
    experts_implementation: Literal["eager", "batched_mm", "grouped_mm"] | None = None
    """How transformers multiplies by experts. Unset: by a function of the engine's own on a CPU, and by
    transformers' choice elsewhere."""
    bfloat16_products: Literal["auto", "native", "float32"] = "auto"
    """How a CPU multiplies bfloat16 matrices. "float32": through float32 copies of the weights, rounded
    afterwards; several times faster on a CPU without bfloat16 instructions, where "auto" chooses it."""
    num_threads: int | None = Field(default=None, ge=1)
    """Threads that torch uses in the engine's worker. Unset: torch's own choice."""
    seed: int = 0
    """From it come the seeds of requests that name none."""
    weight_version: str = "0"
    """Version of the weights that the model starts with."""
