"""The engine contract: every engine is used through it and passes one suite.

Life of an engine: construct -> start -> (generate | pause/resume | sleep/wake | weight updates)* -> close.
Weights: `begin_weight_update(v)`, any number of `update_weights(bucket)`, `commit_weight_update(v)`. Until
the commit the old version is in force or the engine says that it has none; a mixture is never used.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING, Literal

import msgspec

from radix_rl.errors import EngineStateError, RequestError
from radix_rl.types import GenerateOutput, GenerateRequest, PartialOutput

if TYPE_CHECKING:
    from radix_rl.buckets.bucket import WeightBucket

PauseMode = Literal["abort", "retract", "in_place"]
"""abort: running requests end with what they have.
retract: they go back to the queue and are prefilled again.
in_place: they keep their cache and go on where they were."""

MemoryTag = Literal["weights", "kv_cache"]


WeightNames = Literal["model", "checkpoint"]
"""model: parameters as transformers names and joins them. checkpoint: as a Hugging Face checkpoint has
them."""


class EngineCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do, so that what it cannot fails when the configuration is checked."""

    routed_experts: bool
    indexer_topk: bool
    sampling_mask: bool
    output_store: str | None
    """Backend name of the store it writes to; None: it has none."""
    pause_modes: tuple[PauseMode, ...]
    sleep_tags: tuple[MemoryTag, ...]
    weight_transports: tuple[str, ...]
    """Any of "memory", "ipc", "broadcast", "disk", "http"."""
    weight_names: WeightNames = "model"
    """What tensors of an update are called ("disk" always takes a checkpoint)."""
    ordered_admission: bool = False
    """Requests that one turn of the event loop submits are admitted in that order, and queue in this process,
    any number of them. From an empty prefix cache the same requests then meet in the same batches."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    model_path: str
    weight_version: str
    context_length: int
    """Prompt plus output tokens."""
    vocab_size: int
    num_layers: int
    max_request_tokens: int | None = None
    """What the engine's memory holds of one request, where that may be less; None: not told."""
    max_running_requests: int | None = None
    """Requests that a step runs; None: not told."""
    num_experts: int | None = None
    experts_per_token: int | None = None


class Engine(ABC):
    """All methods are coroutines of one event loop. Errors: RequestError, EngineError and its kinds."""

    @property
    @abstractmethod
    def capabilities(self) -> EngineCapabilities: ...

    def check(self, request: GenerateRequest) -> None:
        """Refuse what this engine can never answer, before the request costs anything. Raises RequestError.

        Starts and changes nothing; known after `start`. Here by what the engine says it can do; an engine
        adds the limits that it knows of itself. `generate` of an engine in this process refuses the same.
        """
        check_outputs(request, self.capabilities)

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Load or connect; returns once it can generate."""

    @abstractmethod
    async def info(self) -> EngineInfo: ...

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        """Cancelling this coroutine aborts the request and leaves no stored object."""

    async def stream(self, request: GenerateRequest) -> AsyncIterator[PartialOutput | GenerateOutput]:
        """Any number of PartialOutput, each with all tokens so far, then what `generate` returns.

        An engine that cannot show partial answers yields the last one only. Closing the iterator aborts.
        """
        yield await self.generate(request)

    @abstractmethod
    async def abort(self, request_id: str | None = None, message: str | None = None) -> None:
        """End one request, or all, with what they have. An unknown id may just have finished: ignored."""

    @abstractmethod
    async def pause(self, mode: PauseMode = "in_place") -> None:
        """New requests queue while paused. Pausing twice is an EngineStateError."""

    @abstractmethod
    async def resume(self) -> None:
        """Safe in a `finally`: does nothing when not paused."""

    @abstractmethod
    async def sleep(self, tags: Collection[MemoryTag] = ("weights", "kv_cache")) -> None:
        """Give memory back.

        Idempotent. After weights were dropped, generating is an EngineStateError until the next commit.
        """

    @abstractmethod
    async def wake(self, tags: Collection[MemoryTag] = ("weights", "kv_cache")) -> None: ...

    @abstractmethod
    async def flush_cache(self) -> None:
        """Forget cached prefixes."""

    @abstractmethod
    async def begin_weight_update(self, version: str) -> None:
        """An empty `version` is one that the commit will name."""

    @abstractmethod
    async def update_weights(self, bucket: "WeightBucket") -> None: ...

    @abstractmethod
    async def commit_weight_update(self, version: str) -> None: ...

    @abstractmethod
    async def abort_weight_update(self) -> None:
        """Drop a begun update; safe in a `finally`.

        The old weights stay in force, or the engine says that it has none.
        """

    async def set_weight_version(self, version: str) -> None:
        """Give the weights in force another version name. EngineStateError from an engine that cannot."""
        raise EngineStateError(f"{type(self).__name__} cannot rename its weights; send an update instead")

    @abstractmethod
    async def health(self) -> None:
        """Returns if it can generate; raises EngineDeadError or EngineStateError saying why not."""

    @abstractmethod
    async def close(self) -> None:
        """Idempotent; ends what it started."""


def check_outputs(request: GenerateRequest, can: EngineCapabilities) -> None:
    """Refuse replay outputs that an engine of these capabilities cannot give. Raises RequestError."""
    if request.return_routed_experts and not can.routed_experts:
        raise RequestError(
            "return_routed_experts: this engine does not capture routed experts; start it with "
            "enable_return_routed_experts (--enable-return-routed-experts) and a model that has experts"
        )
    if request.return_indexer_topk and not can.indexer_topk:
        raise RequestError(
            "return_indexer_topk: this engine does not capture indexer top-k; start it with "
            "enable_return_indexer_topk (--enable-return-indexer-topk) and a model that has sparse attention"
        )
    if request.return_sampling_mask and not can.sampling_mask:
        raise RequestError("return_sampling_mask: this engine does not return sampling masks")
    if not request.return_outputs_via_store:
        return
    if can.output_store is None:
        raise RequestError(
            "return_outputs_via_store: this engine has no output store; start it with one "
            "(--output-store-backend NAME), or leave the flag out"
        )
    if not (request.return_routed_experts or request.return_indexer_topk or request.return_sampling_mask):
        raise RequestError(
            "return_outputs_via_store: nothing to store was asked for; ask for return_routed_experts, "
            "return_indexer_topk or return_sampling_mask, or leave the flag out"
        )
