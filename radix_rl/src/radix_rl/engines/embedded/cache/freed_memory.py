"""Memory that tensors gave back to an allocator, given on to whoever else runs on the machine."""

import ctypes
import gc

import torch


def give_back(device: torch.device) -> None:
    """Return what the allocators of `device` hold and nobody uses; slow enough (tens of ms) to be rare.

    glibc keeps freed blocks of up to 32 MB for itself, and torch's allocator for GPUs keeps everything.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
