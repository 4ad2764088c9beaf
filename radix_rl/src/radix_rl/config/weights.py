"""`[weights]`: how new weights reach the engines."""

from typing import Literal

from pydantic import Field

from radix_rl.config.base import Bytes, Section


class WeightsConfig(Section):
    """Weight sync from trainer to engines."""

    transport: Literal["memory", "http"] = "memory"
    """memory: to an engine in this process. http: in the body of requests to a remote engine."""
    bucket_bytes: Bytes = Field(default=64 << 20)
    """Tensors travel in buckets of this size."""
