"""A scripted engine, and a store that counts its backend's reads.

The engine's replay rows tell where they come from.
"""

import asyncio
import uuid
from collections.abc import Callable, Collection, Iterator

import numpy as np
import pytest

from radix_rl.buckets.bucket import WeightBucket
from radix_rl.engines.base import Engine, EngineCapabilities, EngineInfo, MemoryTag, PauseMode
from radix_rl.types import FinishReason, GenerateOutput, GenerateRequest, VersionSpan
from radix_transfer_plugins import OutputStore, TokenOutputStash, create_backend

NUM_LAYERS, TOP_K = 2, 3


def expert_rows(start: int, end: int) -> np.ndarray:
    """`[end - start, 2, 3]` int32: row t holds 100 t + its place, so that a shifted row is seen."""
    rows = np.arange(start, end, dtype=np.int32)[:, None, None] * 100
    return rows + np.arange(NUM_LAYERS * TOP_K, dtype=np.int32).reshape(NUM_LAYERS, TOP_K)


class ScriptedEngine(Engine):
    """Token number c of every answer is 1000 + c. `outcome` may replace any answer or raise."""

    def __init__(self, store: OutputStore | None) -> None:
        self.store = store
        self.requests: list[GenerateRequest] = []
        self.outcome: Callable[[GenerateRequest], GenerateOutput | None] = lambda request: None
        self.output_tokens: Callable[[GenerateRequest], tuple[int, str]] = lambda request: (
            request.sampling.max_new_tokens,
            "length",
        )
        self.delay_s: Callable[[GenerateRequest], float] = lambda request: 0.0
        self.ordered_admission = False
        self.running = 0
        self.most_running = 0

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            routed_experts=True,
            indexer_topk=False,
            sampling_mask=False,
            output_store="memory" if self.store else None,
            pause_modes=("in_place",),
            sleep_tags=(),
            weight_transports=("memory",),
            ordered_admission=self.ordered_admission,
        )

    async def start(self) -> EngineInfo:
        return await self.info()

    async def info(self) -> EngineInfo:
        return EngineInfo(
            model_path="scripted",
            weight_version="1",
            context_length=64,
            vocab_size=2000,
            num_layers=NUM_LAYERS,
        )

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay_s(request))
            replacement = self.outcome(request)
            return replacement if replacement is not None else self.answer(request)
        finally:
            self.running -= 1

    def answer(self, request: GenerateRequest) -> GenerateOutput:
        num_prompt = len(request.input_ids)
        num_outputs, reason = self.output_tokens(request)
        ref = stash = None
        has_rows = num_outputs or reason != "abort"
        if request.return_routed_experts and has_rows:
            start = request.routed_experts_start_len
            rows = expert_rows(start, num_prompt + max(num_outputs - 1, 0))
            stash = TokenOutputStash(routed_experts=rows)
            if request.return_outputs_via_store:
                assert self.store is not None
                (stored,) = self.store.put_many([stash], start_rows=[{"routed_experts": start}])
                ref, stash = stored, None
        return GenerateOutput(
            request_id=request.request_id,
            prompt_tokens=num_prompt,
            output_ids=tuple(1000 + c for c in range(num_outputs)),
            output_logprobs=tuple(-0.5 - c for c in range(num_outputs)),
            finish_reason=FinishReason(type=reason),
            version_spans=(VersionSpan(0, num_outputs, "1"),) if num_outputs else (),
            outputs=stash,
            routed_experts_start=request.routed_experts_start_len,
            output_store_ref=ref,
        )

    async def abort(self, request_id: str | None = None, message: str | None = None) -> None: ...
    async def pause(self, mode: PauseMode = "in_place") -> None: ...
    async def resume(self) -> None: ...
    async def sleep(self, tags: Collection[MemoryTag] = ("weights", "kv_cache")) -> None: ...
    async def wake(self, tags: Collection[MemoryTag] = ("weights", "kv_cache")) -> None: ...
    async def flush_cache(self) -> None: ...
    async def begin_weight_update(self, version: str) -> None: ...
    async def update_weights(self, bucket: WeightBucket) -> None: ...
    async def commit_weight_update(self, version: str) -> None: ...
    async def abort_weight_update(self) -> None: ...
    async def health(self) -> None: ...
    async def close(self) -> None: ...


@pytest.fixture
def store() -> Iterator[OutputStore]:
    # The memory backend is one for the whole process, so each test has a prefix of its own.
    store = OutputStore(backend=create_backend("memory"), key_prefix=f"test/{uuid.uuid4().hex}")
    yield store
    store.delete_objects(older_than_s=0)
    store.close()


@pytest.fixture
def engine(store: OutputStore) -> ScriptedEngine:
    return ScriptedEngine(store)


@pytest.fixture
def rows() -> Callable[[int, int], np.ndarray]:
    return expert_rows


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
