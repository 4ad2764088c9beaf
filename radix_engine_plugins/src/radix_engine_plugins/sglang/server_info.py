"""`/server_info` says that the store is on, where, and by which version, so that a client can refuse a
server which would ignore `return_outputs_via_store`.

Hook: AROUND `utils.common.build_server_info`, the one function behind the HTTP route of single and multiple
front ends.
"""
# pyright: reportMissingImports=false

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from radix_engine_plugins.sglang import hooks
from radix_engine_plugins.sglang.settings import settings_of
from radix_transfer_plugins.backends.config import DEFAULT_KEY_PREFIX
from radix_transfer_plugins.ref import REF_VERSION


def with_output_store(
    original: Callable[..., dict[str, Any]], server_args: Any, scheduler_info: Any
) -> dict[str, Any]:
    info = original(server_args, scheduler_info)
    asked = settings_of(server_args)
    if asked is not None:
        info["output_store"] = {
            "enabled": True,
            "backend": asked.backend,
            "key_prefix": asked.config.get("key_prefix", DEFAULT_KEY_PREFIX),
            "plugin": "radix-engine-plugins",
            "plugin_version": version("radix-engine-plugins"),
            "ref_version": REF_VERSION,
        }
    return info


HOOKS = [("sglang.srt.utils.common.build_server_info", with_output_store, hooks.AROUND)]
