"""`WeightsState`: what the weight routes of one server share."""

from starlette.requests import Request

from radix_rl.engines.base import Engine
from radix_rl.server.settings import ServerSettings
from radix_rl.server.weights.groups import UpdateGroups
from radix_rl.server.weights.update import WeightUpdate


class WeightsState:
    """One event loop uses it. The engine belongs to whoever made it."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.update = WeightUpdate(engine)
        self.groups = UpdateGroups(settings.device, settings.weight_update_timeout_s)


def weights_of(request: Request) -> WeightsState:
    return request.app.state.weights
