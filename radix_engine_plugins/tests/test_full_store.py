"""A shared_memory store without room: every put fails in its own time, however many wait."""

import asyncio
import shutil
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from radix_engine_plugins.writer import OutputStoreWriter
from radix_transfer_plugins import OutputStore, TokenOutputStash, create_backend
from radix_transfer_plugins.errors import StoreFullError

WAIT_S = 0.5


@pytest.fixture
def full_store():
    """No room for 1000 bytes, though its capacity is far more."""
    directory = Path("/dev/shm") / f"radix-test-{uuid.uuid4().hex}"
    config = {"directory": str(directory), "capacity_bytes": 10_000_000, "wait_s": WAIT_S}
    backend = create_backend("shared_memory", config)
    backend.put_batch([("output-store/filler", bytes(9_999_500))])
    yield OutputStore(backend)
    backend.close()
    shutil.rmtree(directory)


@pytest.mark.parametrize("rows", [5_000, 500_000], ids=["put together", "put alone"])
async def test_each_of_many_puts_fails_when_it_has_waited(full_store, rows):
    writer = OutputStoreWriter(full_store, max_concurrent_puts=4)
    stash = TokenOutputStash(routed_experts=np.ones((rows, 1, 1), np.int32))

    async def write(after_s):
        await asyncio.sleep(after_s)
        began_s = time.monotonic()
        with pytest.raises(StoreFullError, match=r"no room .* after 0\.5 s"):
            await writer.write(stash)
        return time.monotonic() - began_s

    waited_s = await asyncio.gather(*(write(0.01 * i) for i in range(48)))
    assert min(waited_s) >= WAIT_S
    assert max(waited_s) < WAIT_S + 1
    await writer.close()
