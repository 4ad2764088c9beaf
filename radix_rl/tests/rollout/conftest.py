"""The scripted engine with numbered tokens, over a store of the test's own."""

import asyncio
import uuid
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from radix_engine_plugins.writer import OutputStoreWriter
from radix_rl.testing import Answer, ScriptedEngine
from radix_rl.testing.scripted_engine import numbered_rows
from radix_rl.types import GenerateOutput, GenerateRequest
from radix_transfer_plugins import OutputStore, create_backend


@pytest.fixture
def store() -> Iterator[OutputStore]:
    # The memory backend is one for the whole process, so each test has a prefix of its own.
    store = OutputStore(backend=create_backend("memory"), key_prefix=f"test/{uuid.uuid4().hex}")
    yield store
    store.delete_objects(older_than_s=0)
    store.close()


@pytest.fixture
def counted() -> Callable[..., Answer]:
    """A script: token number c of every answer is 1000 + c, of log probability -0.5 - c.

    `num_tokens` replaces the request's own number, keywords replace the answer's other fields.
    """

    def make(request: GenerateRequest, num_tokens: int | None = None, **changes: object) -> Answer:
        count = request.sampling.max_new_tokens if num_tokens is None else num_tokens
        fields: dict = {
            "output_ids": range(1000, 1000 + count),
            "logprobs": [-0.5 - place for place in range(count)],
        }
        return Answer(**(fields | changes))

    return make


@pytest.fixture
def engine(store: OutputStore, counted: Callable[..., Answer]) -> Iterator[ScriptedEngine]:
    writer = OutputStoreWriter(OutputStore(create_backend("memory"), store.key_prefix))
    yield ScriptedEngine(counted, writer=writer)
    asyncio.run(writer.close())


@pytest.fixture
def answer(engine: ScriptedEngine) -> Callable[[GenerateRequest], GenerateOutput]:
    """The engine's answer to a request, for tests without an event loop."""
    return lambda request: asyncio.run(engine.generate(request))


@pytest.fixture
def rows() -> Callable[[int, int], np.ndarray]:
    """The engine's rows from a start to an end."""
    return lambda start, end: numbered_rows(end, 2, 3)[start:]


@pytest.fixture
def ask() -> Callable[..., GenerateRequest]:
    """A request over tokens 1..n that asks for routed experts through the store.

    Keywords replace its fields.
    """

    def make(num_tokens: int, **changes: object) -> GenerateRequest:
        fields: dict = {
            "request_id": "r",
            "input_ids": tuple(range(1, num_tokens + 1)),
            "return_routed_experts": True,
            "return_outputs_via_store": True,
        }
        return GenerateRequest(**(fields | changes))

    return make
