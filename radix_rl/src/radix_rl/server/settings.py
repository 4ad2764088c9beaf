"""`ServerSettings`: what the command line decided and the routes need to know."""

from typing import Any

import msgspec


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model_path: str
    served_model_name: str
    """What `/v1/models` answers; requests may name any model, as with SGLang."""
    device: str = "cpu"
    """The engine's, where weights that come over nccl are received."""
    weight_update_timeout_s: float = 300.0
    """How long joining a process group, one broadcast in it, and the body with a bucket, may take."""
    pause_lease_s: float = 600.0
    """How long a pause, or a begun weight update, lasts without a call of the client that made it."""
    max_body_bytes: int = 64 << 20
    """Of a request, except for those that bring weights; longer ones are a 413."""
    parse_timeout_s: float = 20.0
    """How long a body's tokenizing or a chat template's rendering may take."""
    request_timeout_s: float = 60.0
    """How long a client may take to send the head of a request, and then its body; then a 408."""
    max_connections: int | None = None
    """Further ones are a 503; None: as many as the limit of open files leaves room for."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server; "*": any."""
    api_key: str | None = None
    admin_api_key: str | None = None
    """Keys are compared in constant time and never printed or returned."""
    launch_arguments: dict[str, Any] = {}
    """What `/server_info` returns of the command line, without secrets."""
