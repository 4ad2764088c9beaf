"""The stored objects that samples and answers own."""

import logging
from collections.abc import Iterable

from radix_rl.rollout.sample import Sample
from radix_rl.types import GenerateOutput
from radix_transfer_plugins import OutputStore
from radix_transfer_plugins.errors import OutputStoreError

logger = logging.getLogger(__name__)


def delete_refs(samples: Iterable[Sample], store: OutputStore) -> int:
    """Delete every object of the samples, once each, also those whose rows were cut; the number of refs.

    For the `finally` of the last reader: absent objects count as deleted. Raises the store's errors.
    """
    refs = {ref.key: ref for sample in samples for ref in sample.replay.refs()}
    store.delete_many(list(refs.values()))
    return len(refs)


def discard_answer(output: GenerateOutput, store: OutputStore | None) -> None:
    """Delete the object of an answer that was refused.

    Failures are logged: the refusal is the error to raise.
    """
    if store is None or output.output_store_ref is None:
        return
    try:
        store.delete_many([output.output_store_ref])
    except OutputStoreError as error:
        logger.warning("could not delete the object of a refused answer: %s", error)
