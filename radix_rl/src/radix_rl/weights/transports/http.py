"""To servers: the bucket is encoded once and sent as one binary body to each of them."""

from collections.abc import Sequence
from typing import ClassVar

from radix_rl.buckets.bucket import WeightBucket
from radix_rl.buckets.wire import encode_bucket
from radix_rl.engines.fleet import on_all
from radix_rl.engines.weight_protocols import TakesEncodedBuckets
from radix_rl.weights.transports.base import WeightTransport


class HttpTransport(WeightTransport[TakesEncodedBuckets]):
    """Bodies of requests; only our own server takes them."""

    name: ClassVar[str] = "http"
    needs: ClassVar[type] = TakesEncodedBuckets

    async def send(self, engines: Sequence[TakesEncodedBuckets], bucket: WeightBucket) -> int:
        body = encode_bucket(bucket)
        await on_all(engines, lambda engine: engine.update_weights_encoded(body))
        return len(body) * len(engines)
