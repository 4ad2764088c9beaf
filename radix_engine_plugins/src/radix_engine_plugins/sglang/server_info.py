"""`/server_info` says that the store is on, where, and by which version.

A client can so refuse a server which would ignore `return_outputs_via_store`.

Hook: AROUND `utils.common.build_server_info`, the one function behind the HTTP route of single and multiple
front ends.
"""
# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any

from radix_engine_plugins.fields import STORE
from radix_engine_plugins.settings import server_info
from radix_engine_plugins.sglang import hooks
from radix_engine_plugins.sglang.settings import settings_of


def with_output_store(
    original: Callable[..., dict[str, Any]], server_args: Any, scheduler_info: Any
) -> dict[str, Any]:
    info = original(server_args, scheduler_info)
    asked = settings_of(server_args)
    if asked is not None:
        info[STORE] = server_info(asked)
    return info


HOOKS = [("sglang.srt.utils.common.build_server_info", with_output_store, hooks.AROUND)]
