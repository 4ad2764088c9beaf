"""Conformance suites for backends and codecs, to be subclassed in a third party's tests. Needs pytest."""

from radix_transfer_plugins.testing.backend import BackendConformance
from radix_transfer_plugins.testing.codec import CodecConformance

__all__ = ["BackendConformance", "CodecConformance"]
