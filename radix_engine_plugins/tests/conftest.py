import threading
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from radix_transfer_plugins import FieldSpec, OutputStore, StoreRef


class GatedStore(OutputStore):
    """Holds its objects in a dict. While `gate` is closed (`clear`), puts and deletes wait inside the call."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.put_started = threading.Semaphore(0)
        self.objects: set[str] = set()
        self.num_puts = 0
        self.running = 0
        self.most_running = 0
        self.put_error: Exception | None = None
        self.delete_error: Exception | None = None
        self.closed = False
        self._lock = threading.Lock()

    def put_many(
        self, stashes: Sequence[msgspec.Struct], *, start_rows: Sequence[Mapping[str, int]] | None = None
    ) -> list[StoreRef]:
        with self._lock:
            self.num_puts += 1
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            key = f"test/{self.num_puts}"
        self.put_started.release()
        try:
            assert self.gate.wait(30)
            if self.put_error is not None:
                raise self.put_error
            spec = FieldSpec(dtype="int32", shape=(2,), codec="raw", stored_bytes=8, checksum="crc32:00000000")
            with self._lock:
                self.objects.add(key)
        finally:
            with self._lock:
                self.running -= 1
        return [StoreRef(backend="gated", key=key, fields={"routed_experts": spec})]

    def delete_many(self, refs: Sequence[StoreRef]) -> None:
        if self.delete_error is not None:
            raise self.delete_error
        with self._lock:
            self.objects -= {ref.key for ref in refs}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def gated_store():
    store = GatedStore()
    yield store
    store.gate.set()
