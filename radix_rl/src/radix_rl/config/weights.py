"""`[weights]`: how new weights reach the engines."""

from typing import Literal

from pydantic import Field

from radix_rl.config.base import Bytes, FilePath, Section


class WeightsConfig(Section):
    """Weight sync from trainer to engines."""

    transport: Literal["memory", "http", "broadcast", "disk"] = "memory"
    """memory: to an engine in this process. To remote engines: in the bodies of requests (http, our server
    only), over a torch process group (broadcast), or as a checkpoint in a folder that they see (disk)."""
    bucket_bytes: Bytes = Field(default=64 << 20)
    """Tensors travel in buckets of this size."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """broadcast: nccl from GPU to GPU, gloo from host to host memory."""
    host: str = "127.0.0.1"
    """broadcast: address of the trainer's machine at which every engine reaches it."""
    port: int = Field(default=0, ge=0, le=65535)
    """broadcast: where the trainer waits for the engines. 0: the system chooses."""
    timeout_s: float = Field(default=300.0, gt=0)
    """broadcast: how long meeting the engines, and one bucket, may take."""
    directory: FilePath | None = None
    """disk: folder of the versions, which every engine sees under the same path. Unset: weights in
    output_dir."""
