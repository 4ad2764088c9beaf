import threading
import uuid
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from radix_transfer_plugins import OutputStore, StoreRef, create_backend


class GatedStore(OutputStore):
    """A store in memory that can be told to wait and to fail.

    While `gate` is cleared, puts wait inside the call.
    """

    def __init__(self) -> None:
        config = {"name": uuid.uuid4().hex, "key_prefix": "test/run"}
        super().__init__(backend=create_backend("memory", config))
        self._view = OutputStore(backend=create_backend("memory", config))
        self.gate = threading.Event()
        self.gate.set()
        self.put_started = threading.Semaphore(0)
        self.num_puts = 0
        self.running = 0
        self.most_running = 0
        self.put_error: Exception | None = None
        self.delete_error: Exception | None = None
        self.closed = False
        self._lock = threading.Lock()

    @property
    def objects(self) -> set[str]:
        """Keys of stored objects, also after `close`."""
        return {info.key.rpartition("/")[0] for info in self._view.list_objects()}

    def put_many(
        self,
        stashes: Sequence[msgspec.Struct],
        *,
        start_rows: Sequence[Mapping[str, int]] | None = None,
        waited_s: float = 0.0,
    ) -> list[StoreRef]:
        with self._lock:
            self.num_puts += 1
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        self.put_started.release()
        try:
            assert self.gate.wait(30)
            if self.put_error is not None:
                raise self.put_error
            return super().put_many(stashes, start_rows=start_rows, waited_s=waited_s)
        finally:
            with self._lock:
                self.running -= 1

    def delete_many(self, refs: Sequence[StoreRef]) -> None:
        if self.delete_error is not None:
            raise self.delete_error
        super().delete_many(refs)

    def close(self) -> None:
        self.closed = True
        super().close()

    def close_view(self) -> None:
        self._view.close()


@pytest.fixture
def gated_store():
    store = GatedStore()
    yield store
    store.gate.set()
    store.close_view()
