"""To engines in this process: they read the bucket itself."""

from collections.abc import Sequence
from typing import ClassVar

from radix_rl.buckets.bucket import WeightBucket
from radix_rl.engines.base import Engine
from radix_rl.engines.fleet import on_all
from radix_rl.weights.transports.base import WeightTransport


class MemoryTransport(WeightTransport[Engine]):
    name: ClassVar[str] = "memory"

    async def send(self, engines: Sequence[Engine], bucket: WeightBucket) -> int:
        await on_all(engines, lambda engine: engine.update_weights(bucket))
        return bucket.buffer.numel()
