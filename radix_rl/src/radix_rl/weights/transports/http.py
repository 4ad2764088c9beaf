"""To servers: the bucket is encoded once and sent as one binary body to each of them."""

from collections.abc import Sequence
from typing import ClassVar

from radix_rl.buckets.bucket import WeightBucket
from radix_rl.buckets.wire import encode_bucket
from radix_rl.engines.base import Engine
from radix_rl.engines.fleet import on_all
from radix_rl.engines.remote.engine import RemoteEngine
from radix_rl.errors import ConfigurationError
from radix_rl.weights.transports.base import WeightTransport


class HttpTransport(WeightTransport):
    name: ClassVar[str] = "http"

    async def send(self, engines: Sequence[Engine], bucket: WeightBucket) -> int:
        body = encode_bucket(bucket)

        async def post(engine: Engine) -> None:
            if not isinstance(engine, RemoteEngine):
                raise ConfigurationError(
                    f'weights.transport "http" needs remote engines, got {type(engine).__name__}'
                )
            await engine.update_weights_encoded(body)

        await on_all(engines, post)
        return len(body) * len(engines)
