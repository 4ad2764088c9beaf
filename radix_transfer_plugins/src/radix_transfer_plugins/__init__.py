"""Output store for RL rollouts: references, lossless codecs, storage backends.

Imports neither torch nor an engine.

store.py           `OutputStore`: stashes in, references out; references in, stashes back
stash.py           what an engine hands to the store: one Struct of arrays for each response
ref.py             `StoreRef`: the versioned reference that travels in place of the arrays
responses.py       finds references in the responses of engines
keys.py            which keys exist, and which of them a store may touch
read_plan.py       what a batch of read requests needs from the backend
views.py           arrays over memory that a backend lends
buffers.py         byte views of what codecs produce and backends store
huge_pages.py      memory for large arrays
backends/          where objects lie: the contract, and one file or folder a backend
codecs/            how an array becomes bytes and back: the contract, and one file a codec
registry.py        backends and codecs by name
class_registry.py  classes by name, from code and from entry points
sizes.py           sizes and durations as people write and read them
errors.py          every error this package raises
cli.py             the command `radix-store`
testing/           conformance suites for backends and codecs
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
