"""`shared_memory`: many unrelated processes on one machine, no server.

backend.py    puts, reads, deletes
space.py      one process's hold on a directory of objects: names, accounting and recovery
layout.py     what the files of a space look like
directory.py  directories that only this user can enter
config.py     what a user writes, checked and in its units
"""

from radix_transfer_plugins.backends.shared_memory.backend import SharedMemoryBackend
from radix_transfer_plugins.backends.shared_memory.config import SharedMemoryConfig

__all__ = ["SharedMemoryBackend", "SharedMemoryConfig"]
