"""Registers hooks with SGLang's own registry, strictly.

SGLang logs a hook whose target does not exist and goes on. With the store asked for, a server without one of its hooks
would lose or misplace outputs, so here that is an error which stops the launch.
"""
# pyright: reportMissingImports=false

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

Hook = tuple[str, Callable[..., Any], HookType]
"""Dotted path of the target, the hook, and how it is applied."""

AFTER, AROUND, REPLACE = HookType.AFTER, HookType.AROUND, HookType.REPLACE

_SOURCE = HookSource(plugin_name="radix_output_store", dist_name="radix-engine-plugins")


def install(hooks: Sequence[Hook]) -> None:
    """Apply `hooks` in this process, once however often asked. RuntimeError names the targets that did not take one."""
    new = [hook for hook in hooks if hook[0] not in HookRegistry._patched]
    for target, function, kind in new:
        HookRegistry.register(target, function, kind, source=_SOURCE)
    HookRegistry.apply_hooks()
    missing = [target for target, _, _ in new if target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(f"output store: this SGLang has no {', '.join(missing)}; the log above says why")
