"""The request field `return_outputs_via_store`.

SGLang drops unknown JSON fields in silence, so the classes that requests are parsed into are replaced by
subclasses with the field. Hooks:
- REPLACE `io_struct.GenerateReqInput` (/generate, and what chat and Engine are turned into) and
  `openai.protocol.ChatCompletionRequest`. Both before `http_server` is imported: its routes bind the
  classes then.
- AROUND `Engine.generate` and `Engine.async_generate`: the keyword argument.
"""
# pyright: reportMissingImports=false

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from sglang.srt.entrypoints.openai import protocol
from sglang.srt.managers import io_struct

from radix_engine_plugins.sglang import hooks

_engine_opt_in: ContextVar[bool] = ContextVar("radix_engine_opt_in", default=False)


@dataclasses.dataclass
class GenerateReqInput(io_struct.GenerateReqInput):
    return_outputs_via_store: bool = dataclasses.field(default=False, kw_only=True)

    def __getitem__(self, i: int) -> "GenerateReqInput":
        sub = super().__getitem__(i)
        sub.return_outputs_via_store = self.return_outputs_via_store
        sub.__dict__["radix_root"] = self
        return sub


class ChatCompletionRequest(protocol.ChatCompletionRequest):
    return_outputs_via_store: bool = False


def opted_in(obj: Any) -> bool:
    """False for requests of other kinds, such as embeddings."""
    return getattr(obj, "return_outputs_via_store", False)


def root_of(obj: Any) -> Any | None:
    """The client's request that this item of a batch belongs to; None: it is no item.

    Copies keep the link.
    """
    return obj.__dict__.get("radix_root")


def adopt_engine_opt_in(obj: Any) -> None:
    """Call where the engine hands its request over, in the same context."""
    if _engine_opt_in.get() and hasattr(obj, "return_outputs_via_store"):
        obj.return_outputs_via_store = True


def engine_generate(
    original: Callable[..., Any],
    engine: Any,
    *args: Any,
    return_outputs_via_store: bool = False,
    **kwargs: Any,
) -> Any:
    token = _engine_opt_in.set(return_outputs_via_store)
    try:
        return original(engine, *args, **kwargs)
    finally:
        _engine_opt_in.reset(token)


async def engine_async_generate(
    original: Callable[..., Any],
    engine: Any,
    *args: Any,
    return_outputs_via_store: bool = False,
    **kwargs: Any,
) -> Any:
    token = _engine_opt_in.set(return_outputs_via_store)
    try:
        return await original(engine, *args, **kwargs)
    finally:
        _engine_opt_in.reset(token)


CLASSES = [
    ("sglang.srt.managers.io_struct.GenerateReqInput", GenerateReqInput, hooks.REPLACE),
    ("sglang.srt.entrypoints.openai.protocol.ChatCompletionRequest", ChatCompletionRequest, hooks.REPLACE),
]
HOOKS = [
    ("sglang.srt.entrypoints.engine.Engine.generate", engine_generate, hooks.AROUND),
    ("sglang.srt.entrypoints.engine.Engine.async_generate", engine_async_generate, hooks.AROUND),
]
