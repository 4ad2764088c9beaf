"""Hooks in SGLang's functions, by its own registry, strictly.

SGLang logs a hook whose target does not exist and goes on. With the store asked for, a server without one of
its hooks would lose or misplace outputs, so here that is an error which stops the launch.
"""
# pyright: reportMissingImports=false

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

Hook = tuple[str, Callable[..., Any], HookType]
"""Dotted path of the target, the hook, and how it is applied."""

AFTER, AROUND, REPLACE = HookType.AFTER, HookType.AROUND, HookType.REPLACE

_SOURCE = HookSource(plugin_name="radix_output_store", dist_name="radix-engine-plugins")
_applied: set[str] = set()


def register(hooks: Sequence[Hook]) -> None:
    """While plugins load: SGLang applies them afterwards, in order with other plugins' hooks.

    RuntimeError if a target does not exist.
    """
    for target, function, kind in hooks:
        _require(target)
        HookRegistry.register(target, function, kind, source=_SOURCE)


def apply(hooks: Sequence[Hook]) -> None:
    """After plugins have loaded: at once, around what other plugins put there. Repeating it does nothing."""
    for target, function, kind in hooks:
        if target not in _applied:
            _require(target)
            # The registry's public way takes no second set of hooks for a target that it has already hooked.
            HookRegistry._apply_target(target, [(kind, function, _SOURCE)])
            _applied.add(target)


def _require(target: str) -> None:
    owner, _, name = target.rpartition(".")
    try:
        getattr(pkgutil.resolve_name(owner), name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"output store: this SGLang has no {target}: {error}") from error
