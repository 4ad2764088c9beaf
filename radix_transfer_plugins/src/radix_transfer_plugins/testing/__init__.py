"""Conformance suites for backends and codecs, to be subclassed in a third party's tests. Needs pytest.

backend.py  what every backend promises to `OutputStore`
codec.py    what every codec promises to `OutputStore`
"""

from radix_transfer_plugins.testing.backend import BackendConformance
from radix_transfer_plugins.testing.codec import CodecConformance

__all__ = ["BackendConformance", "CodecConformance"]
