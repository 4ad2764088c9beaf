"""A model's parameters, given away one by one."""

from collections.abc import Iterator

import torch


def released(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by name, tied ones once.

    The model loses each as it is given, so that its memory is free as soon as the receiver lets go of it.
    """
    for name, parameter in model.named_parameters():
        tensor = parameter.data
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        yield name, tensor
        del tensor
