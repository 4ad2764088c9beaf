"""`ServerSettings`: what the command line decided and the routes need to know."""

from typing import Any

import msgspec


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model_path: str
    served_model_name: str
    """What `/v1/models` answers; requests may name any model, as with SGLang."""
    enable_return_routed_experts: bool = False
    output_store_backend: str | None = None
    """Registered backend name; None: opting in is a 400."""
    device: str = "cpu"
    """The engine's, where weights that come over nccl are received."""
    weight_update_timeout_s: float = 300.0
    """How long joining a process group, one broadcast in it, and the body with a bucket, may take."""
    pause_lease_s: float = 600.0
    """How long a pause, or a begun weight update, lasts without a call of the client that made it."""
    api_key: str | None = None
    admin_api_key: str | None = None
    """Keys are compared in constant time and never printed or returned."""
    launch_arguments: dict[str, Any] = {}
    """What `/server_info` returns of the command line, without secrets."""
