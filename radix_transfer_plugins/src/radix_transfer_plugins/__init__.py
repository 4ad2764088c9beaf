"""Output store for RL rollouts: references, lossless codecs, storage backends.

Imports neither torch nor an engine.
"""

from radix_transfer_plugins.ref import FieldSpec, StoreRef
from radix_transfer_plugins.registry import create_backend, register_backend, register_codec
from radix_transfer_plugins.stash import TokenOutputStash, token_output_codecs
from radix_transfer_plugins.store import OutputStore

__all__ = [
    "FieldSpec",
    "OutputStore",
    "StoreRef",
    "TokenOutputStash",
    "create_backend",
    "register_backend",
    "register_codec",
    "token_output_codecs",
]
