"""Memory that tensors gave back to an allocator, given on to whoever else runs on the machine."""

import contextlib
import ctypes
import gc
from collections.abc import Iterator

import torch

from radix_rl.errors import EngineStateError


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


@contextlib.contextmanager
def no_memory_is_told(what: str) -> Iterator[None]:
    """Turn an allocator's refusal into an EngineStateError that names `what` was to be woken."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On a CPU torch raises a plain RuntimeError.
        is_refusal = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_refusal and "can't allocate memory" not in str(error):
            raise
        raise EngineStateError(
            f"there is not enough memory to wake {what}, which stays asleep; free some and wake it again"
        ) from error
