"""`EmbeddedEngineSetup`: the settings of the embedded engine and what only its caller knows."""

from pydantic import Field

from radix_rl.config.base import Seed
from radix_rl.config.engine import EmbeddedEngineConfig
from radix_rl.config.output_store import OutputStoreConfig


class EmbeddedEngineSetup(EmbeddedEngineConfig):
    """One engine, one model, one process: the user's settings, the model and what is done with its rows."""

    model_path: str | None = None
    """Folder of a Hugging Face checkpoint, or of a GGUF file (see `gguf_file`). None: the model is passed as
    an object.
    """
    gguf_file: str | None = None
    """File name below `model_path`; its weights are unpacked to `dtype`."""
    tokenizer_path: str | None = None
    """Unset: `model_path`. A model without tokenizer files runs, but knows no stop strings."""
    enable_return_routed_experts: bool = False
    """Capture the experts that each token was routed to. Refused for a model without routers that are
    known.
    """
    enable_return_indexer_topk: bool = False
    """Capture the key positions that sparse attention kept. Refused for a model without a known indexer."""
    output_store: OutputStoreConfig | None = None
    """None: requests that ask for the store are refused."""
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads that torch uses in the engine's worker. Unset: torch's own choice."""
    seed: Seed = 0
    """From it come the seeds of requests that name none."""
    weight_version: str = "0"
    """Version of the weights that the model starts with."""
