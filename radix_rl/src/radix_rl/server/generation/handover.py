"""`Handover`: who owns the stored objects of one response until its client has the references."""

from typing import Any

from radix_engine_plugins.writer import OutputStoreWriter
from radix_rl.types import GenerateOutput
from radix_transfer_plugins import StoreRef


class Handover:
    """Owns what it took until `delivered`; `close` deletes the rest in the background.

    Used by one event loop. An output taken after `close` is deleted at once, so a late answer of a request
    that nobody waits for leaves nothing either.
    """

    def __init__(self, writer: OutputStoreWriter | None) -> None:
        self._writer = writer
        self._refs: dict[str, dict[str, Any]] = {}
        self._closed = False

    def take(self, output: GenerateOutput) -> None:
        if output.output_store_ref is None:
            return
        self._refs[output.request_id] = output.output_store_ref
        if self._closed:
            self._discard()

    def owns(self, output: GenerateOutput) -> bool:
        return output.request_id in self._refs

    def delivered(self, output: GenerateOutput) -> None:
        """The last byte of the reference was sent: the client owns the object."""
        self._refs.pop(output.request_id, None)

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._discard()

    def _discard(self) -> None:
        refs = [StoreRef.from_builtins(ref) for ref in self._refs.values()]
        self._refs.clear()
        if refs:
            assert self._writer is not None, "create_app refuses an engine with a store and no writer"
            self._writer.discard(refs)
