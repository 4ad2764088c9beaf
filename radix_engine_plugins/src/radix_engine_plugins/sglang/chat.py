"""The reference in chat answers: `choices[].meta_info.output_store_ref`.

In a stream it is in each choice's finish chunk.

Hooks:
- AROUND `OpenAIServingChat._convert_to_internal_request`: carries the field on. Asking for a reference asks
  for `meta_info`, the only place of an answer that holds one. (A stream refuses `return_meta_info`.)
- AROUND `OpenAIServingChat._generate_chat_stream`: stock streams have no `meta_info`, so it is added to the
  chunk.
"""
# pyright: reportMissingImports=false

from collections.abc import AsyncIterator, Callable
from typing import Any

from radix_engine_plugins.sglang import hooks
from radix_engine_plugins.sglang.request_fields import opted_in
from radix_engine_plugins.streams import with_refs
from radix_transfer_plugins.responses import REF_KEY

_ATTRIBUTE = "radix_streamed_refs"


def convert_to_internal_request(
    original: Callable[..., tuple[Any, Any]], serving: Any, request: Any, raw_request: Any = None
) -> tuple[Any, Any]:
    wanted = opted_in(request)
    if wanted and not request.stream:
        request.return_meta_info = True
    adapted, processed = original(serving, request, raw_request)
    if wanted:
        adapted.return_outputs_via_store = True
    return adapted, processed


def generate_chat_stream(
    original: Callable[..., AsyncIterator[str]], serving: Any, adapted: Any, request: Any, raw_request: Any
) -> AsyncIterator[str]:
    chunks = original(serving, adapted, request, raw_request)
    if not opted_in(adapted):
        return chunks
    return with_refs(chunks, lambda: streamed_refs(adapted), _place)


def streamed_refs(obj: Any) -> dict[int, dict[str, Any]]:
    """References of a streaming request that were handed on, by index of the choice."""
    return obj.__dict__.setdefault(_ATTRIBUTE, {})


def _place(choice: dict[str, Any], ref: dict[str, Any]) -> None:
    choice["meta_info"] = {REF_KEY: ref}


_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
HOOKS = [
    (f"{_CHAT}._convert_to_internal_request", convert_to_internal_request, hooks.AROUND),
    (f"{_CHAT}._generate_chat_stream", generate_chat_stream, hooks.AROUND),
]
