"""An engine that keeps what it is sent, and can be told to fail at any step of an update."""

from collections.abc import Callable, Collection

import pytest
import torch

from radix_rl.buckets.bucket import WeightBucket
from radix_rl.engines.base import Engine, EngineCapabilities, EngineInfo, MemoryTag, PauseMode
from radix_rl.errors import EngineDeadError, EngineStateError
from radix_rl.types import GenerateOutput, GenerateRequest


class KeepingEngine(Engine):
    def __init__(self, transports: tuple[str, ...] = ("memory",)) -> None:
        self.transports = transports
        self.version = "0"
        self.weights: dict[str, torch.Tensor] = {}
        self.staged: dict[str, torch.Tensor] | None = None
        self.paused = False
        self.asleep = False
        self.calls: list[str] = []
        self.fails_at: str | None = None
        self.failure: BaseException = EngineDeadError("unplugged")

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_at:
            raise self.failure

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            routed_experts=False,
            indexer_topk=False,
            sampling_mask=False,
            output_store=None,
            pause_modes=("in_place",),
            sleep_tags=("weights",),
            weight_transports=self.transports,
        )

    async def start(self) -> EngineInfo:
        return await self.info()

    async def info(self) -> EngineInfo:
        return EngineInfo(
            model_path="m", weight_version=self.version, context_length=8, vocab_size=8, num_layers=1
        )

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        raise NotImplementedError

    async def abort(self, request_id: str | None = None, message: str | None = None) -> None: ...

    async def pause(self, mode: PauseMode = "in_place") -> None:
        self._called("pause")
        if self.paused:
            raise EngineStateError("paused already")
        self.paused = True

    async def resume(self) -> None:
        self._called("resume")
        self.paused = False

    async def sleep(self, tags: Collection[MemoryTag] = ("weights", "kv_cache")) -> None:
        self.asleep = True

    async def wake(self, tags: Collection[MemoryTag] = ("weights", "kv_cache")) -> None: ...
    async def flush_cache(self) -> None: ...

    async def begin_weight_update(self, version: str) -> None:
        self._called("begin")
        assert self.paused
        self.staged = dict(self.weights)

    async def update_weights(self, bucket: WeightBucket) -> None:
        self._called("update")
        assert self.staged is not None
        for name, tensor in bucket.tensors():
            self.staged[name] = tensor.clone()

    async def commit_weight_update(self, version: str) -> None:
        self._called("commit")
        assert self.staged is not None
        self.weights, self.staged, self.version = self.staged, None, version

    async def abort_weight_update(self) -> None:
        self._called("abort")
        self.staged = None

    async def health(self) -> None: ...
    async def close(self) -> None: ...


@pytest.fixture
def make_engine() -> Callable[..., KeepingEngine]:
    return KeepingEngine


@pytest.fixture
def named_tensors() -> list[tuple[str, torch.Tensor]]:
    """Five tensors of several dtypes and shapes, 84 bytes in all."""
    return [
        ("a", torch.arange(6, dtype=torch.float32).view(2, 3)),
        ("b", torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16)),
        ("c", torch.tensor(7, dtype=torch.int64)),
        ("d", torch.arange(10, dtype=torch.float32).view(5, 2).t()),
        ("empty", torch.zeros(0, 3)),
    ]
