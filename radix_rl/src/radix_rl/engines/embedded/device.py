"""Where the engine's model lies."""

import torch


def resolve_device(name: str) -> str:
    """The torch device that the setting `device` means: "auto" is the first GPU, else the CPU."""
    if name != "auto":
        return name
    return "cuda:0" if torch.cuda.is_available() else "cpu"
