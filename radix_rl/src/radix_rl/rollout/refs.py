"""The stored objects that samples and answers own."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from radix_rl.rollout.sample import Sample
from radix_rl.types import GenerateOutput
from radix_transfer_plugins import OutputStore
from radix_transfer_plugins.errors import OutputStoreError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def delete_refs(samples: Iterable[Sample], store: OutputStore) -> int:
    """Delete every object of the samples, once each, also those whose rows were cut; the number of refs.

    For the `finally` of the last reader: absent objects count as deleted. Raises the store's errors.
    """
    refs = {ref.key: ref for sample in samples for ref in sample.replay.refs()}
    store.delete_many(list(refs.values()))
    return len(refs)


def discard_answer(output: GenerateOutput, store: OutputStore | None) -> None:
    """Delete the object of an answer that was refused. Failures are logged: the refusal is the error to
    raise."""
    if store is None or output.output_store_ref is None:
        return
    try:
        store.delete_many([output.output_store_ref])
    except OutputStoreError as error:
        logger.warning("could not delete the object of a refused answer: %s", error)


async def in_thread_to_end(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run clean-up off the event loop, to its end even if this coroutine is cancelled meanwhile.

    `asyncio.to_thread` alone drops a call that still waits for a thread when its task is cancelled, and
    with it the deletion of what nobody else knows of.
    """
    work = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            break
    if cancelled is not None:
        raise cancelled
    return work.result()
