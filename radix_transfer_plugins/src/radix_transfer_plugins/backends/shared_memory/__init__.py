"""`shared_memory`: many unrelated processes on one machine, no server."""

from radix_transfer_plugins.backends.shared_memory.backend import SharedMemoryBackend
from radix_transfer_plugins.backends.shared_memory.config import SharedMemoryConfig

__all__ = ["SharedMemoryBackend", "SharedMemoryConfig"]
