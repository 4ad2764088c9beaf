"""Where metrics go, by configuration."""

from radix_rl.observe.trackers.factory import create_trackers

__all__ = ["create_trackers"]
