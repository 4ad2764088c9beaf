"""Loads the real packages before pytest names test modules after their folders, which bear the same names."""

import radix_engine_plugins
import radix_rl
import radix_transfer_plugins

__all__ = ["radix_engine_plugins", "radix_rl", "radix_transfer_plugins"]
