"""What the operator of a server asked for, whichever engine it runs."""

from importlib.metadata import version
from typing import Any

import msgspec

from radix_transfer_plugins.backends.config import DEFAULT_KEY_PREFIX
from radix_transfer_plugins.ref import REF_VERSION


class StoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    backend: str
    config: dict[str, Any]


def server_info(settings: StoreSettings) -> dict[str, Any]:
    """`output_store` of a server's `/server_info`, by which clients know that opting in has an effect."""
    return {
        "enabled": True,
        "backend": settings.backend,
        "key_prefix": settings.config.get("key_prefix", DEFAULT_KEY_PREFIX),
        "plugin": "radix-engine-plugins",
        "plugin_version": version("radix-engine-plugins"),
        "ref_version": REF_VERSION,
    }
