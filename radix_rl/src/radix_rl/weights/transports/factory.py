"""Weight transports by the name of their setting."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from radix_rl.config.weights import WeightsConfig
from radix_rl.weights.transports.base import WeightTransport


@dataclass(frozen=True, kw_only=True)
class TransportInputs:
    """What a transport can be made of."""

    settings: WeightsConfig
    directory: Path
    """For versions on disk, if the settings name no folder."""
    model_path: Path
    """The model whose configuration a checkpoint gets."""
    device: torch.device
    """The trainer's."""


def _memory(_inputs: TransportInputs) -> WeightTransport[Any]:
    from radix_rl.weights.transports.memory import MemoryTransport

    return MemoryTransport()


def _http(_inputs: TransportInputs) -> WeightTransport[Any]:
    from radix_rl.weights.transports.http import HttpTransport

    return HttpTransport()


def _broadcast(inputs: TransportInputs) -> WeightTransport[Any]:
    from radix_rl.weights.transports.broadcast import BroadcastTransport

    settings = inputs.settings
    return BroadcastTransport(
        backend=settings.backend,
        host=settings.host,
        port=settings.port,
        device=inputs.device,
        timeout_s=settings.timeout_s,
    )


def _disk(inputs: TransportInputs) -> WeightTransport[Any]:
    from radix_rl.weights.transports.disk import DiskTransport

    return DiskTransport(inputs.settings.directory or inputs.directory, inputs.model_path)


TRANSPORTS: dict[str, Callable[[TransportInputs], WeightTransport[Any]]] = {
    "memory": _memory,
    "http": _http,
    "broadcast": _broadcast,
    "disk": _disk,
}


def create_transport(
    settings: WeightsConfig, *, directory: Path, model_path: Path, device: str = "cpu"
) -> WeightTransport[Any]:
    """The transport that `settings` names; see `TransportInputs` for the rest."""
    inputs = TransportInputs(
        settings=settings, directory=directory, model_path=model_path, device=torch.device(device)
    )
    return TRANSPORTS[settings.transport](inputs)
