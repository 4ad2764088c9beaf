"""The configured transport."""

from pathlib import Path

import torch

from radix_rl.config.weights import WeightsConfig
from radix_rl.weights.transports.base import WeightTransport


def create_transport(
    settings: WeightsConfig, *, directory: Path, model_path: Path, device: str = "cpu"
) -> WeightTransport:
    """`directory` and `model_path` are for "disk": where versions go if `settings` names no folder, and whose
    configuration they get. `device` is the trainer's, for broadcasts over nccl."""
    if settings.transport == "memory":
        from radix_rl.weights.transports.memory import MemoryTransport

        return MemoryTransport()
    if settings.transport == "http":
        from radix_rl.weights.transports.http import HttpTransport

        return HttpTransport()
    if settings.transport == "broadcast":
        from radix_rl.weights.transports.broadcast import BroadcastTransport

        return BroadcastTransport(
            backend=settings.backend,
            host=settings.host,
            port=settings.port,
            device=torch.device(device),
            timeout_s=settings.timeout_s,
        )
    from radix_rl.weights.transports.disk import DiskTransport

    return DiskTransport(settings.directory or directory, model_path)
