"""Memory for large arrays that are written right after they are made."""

import math

import numpy as np

_HUGE_PAGE_BYTES = 1 << 21
_MIN_BYTES = 1 << 22


def new_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """As np.empty, C-contiguous; large arrays begin on a huge page.

    numpy asks Linux for huge pages where an array covers them whole. First writing an array of a few
    megabytes costs several times less when all of it lies on them; the room skipped is never touched.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _MIN_BYTES:
        return np.empty(shape, dtype)
    room = np.empty(num_bytes + _HUGE_PAGE_BYTES, np.uint8)
    first = -room.ctypes.data % _HUGE_PAGE_BYTES
    return room[first : first + num_bytes].view(dtype).reshape(shape)
