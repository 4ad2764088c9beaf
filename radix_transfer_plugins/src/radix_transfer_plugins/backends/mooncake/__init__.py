"""`mooncake`: many machines. The client's wheel is imported when a backend is created, not before."""

from radix_transfer_plugins.backends.mooncake.backend import MooncakeBackend
from radix_transfer_plugins.backends.mooncake.config import MooncakeConfig

__all__ = ["MooncakeBackend", "MooncakeConfig"]
