"""The stored objects that samples own."""

from collections.abc import Iterable

from radix_rl.rollout.sample import Sample
from radix_transfer_plugins import OutputStore, StoreRef


def delete_refs(samples: Iterable[Sample], store: OutputStore) -> int:
    """Delete every object of the samples, once each, also those whose rows were cut; the number of refs.

    For the `finally` of the last reader: absent objects count as deleted. Raises the store's errors.
    """
    refs = {ref["key"]: ref for sample in samples for ref in sample.replay.refs()}
    store.delete_many([StoreRef.from_builtins(ref) for ref in refs.values()])
    return len(refs)
