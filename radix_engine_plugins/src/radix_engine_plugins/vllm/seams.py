"""Wraps functions of vLLM, strictly.

A seam that is gone is an error that stops the launch, since a server without it would lose or misplace
outputs.

vLLM may load plugins several times in one process, so wrapping the same function again does nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

_MARK = "__radix_output_store__"


def around(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Calls of `owner.name(...)` become `hook(original, ...)`. RuntimeError if there is no such function."""
    original = require(owner, name)
    if getattr(original, _MARK, None) is hook:
        return

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(hooked, _MARK, hook)
    setattr(owner, name, hooked)


def require(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__qualname__", None) or owner.__name__
        raise RuntimeError(f"output store: this vLLM has no {where}.{name}; see docs/vllm.md") from None
