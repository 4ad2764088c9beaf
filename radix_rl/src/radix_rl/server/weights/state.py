"""`WeightsState`: what the weight routes of one server share."""

from contextlib import AbstractContextManager

from starlette.requests import Request

from radix_rl.buckets.wire import OWNER_HEADER
from radix_rl.engines.base import Engine
from radix_rl.server.settings import ServerSettings
from radix_rl.server.weights.groups import UpdateGroups
from radix_rl.server.weights.lease import UpdateLease
from radix_rl.server.weights.update import WeightUpdate


class WeightsState:
    """One event loop uses it. The engine belongs to whoever made it."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine = engine
        self.update = WeightUpdate(engine)
        self.groups = UpdateGroups(settings.device, settings.weight_update_timeout_s)
        self.is_paused = False
        """By a client; an update's own pause, which ends with it, does not count."""
        self.lease = UpdateLease(
            settings.pause_lease_s,
            is_needed=lambda: self.is_paused or self.update.is_open,
            end=self.end_pause,
        )

    async def end_pause(self) -> None:
        """Drop the update, if one is open, and continue, if the engine is paused."""
        try:
            await self.update.abort()
        finally:
            await self._engine.resume()
            self.is_paused = False


def lease_call(request: Request) -> AbstractContextManager[None]:
    """A call of the client that the request names, as `UpdateLease.call`."""
    return weights_of(request).lease.call(request.headers.get(OWNER_HEADER))


def weights_of(request: Request) -> WeightsState:
    return request.app.state.weights
