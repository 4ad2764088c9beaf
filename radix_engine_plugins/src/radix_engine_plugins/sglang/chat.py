"""The reference in chat answers: `choices[].meta_info.output_store_ref`; in a stream, in each choice's
finish chunk.

Hooks:
- AROUND `OpenAIServingChat._convert_to_internal_request`: carries the field on. Asking for a reference asks
  for `meta_info`, the only place of an answer that holds one. (A stream refuses `return_meta_info`.)
- AROUND `OpenAIServingChat._generate_chat_stream`: stock streams have no `meta_info`, so it is added to the
  chunk.
"""
# pyright: reportMissingImports=false

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from radix_engine_plugins.sglang import hooks
from radix_engine_plugins.sglang.request_fields import opted_in

_DATA = "data: "
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
    return _with_refs(chunks, streamed_refs(adapted)) if opted_in(adapted) else chunks


def streamed_refs(obj: Any) -> dict[int, dict[str, Any]]:
    """References of a streaming request that were handed on, by index of the choice."""
    return obj.__dict__.setdefault(_ATTRIBUTE, {})


async def _with_refs(chunks: Any, refs: dict[int, dict[str, Any]]) -> AsyncIterator[str]:
    try:
        async for chunk in chunks:
            yield _with_ref(chunk, refs) if refs and '"finish_reason":"' in chunk else chunk
    finally:
        await chunks.aclose()


def _with_ref(chunk: str, refs: dict[int, dict[str, Any]]) -> str:
    body = json.loads(chunk.removeprefix(_DATA))
    for choice in body["choices"]:
        if choice.get("finish_reason") is not None and choice["index"] in refs:
            choice["meta_info"] = {"output_store_ref": refs[choice["index"]]}
    return f"{_DATA}{json.dumps(body, separators=(',', ':'))}\n\n"


_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
HOOKS = [
    (f"{_CHAT}._convert_to_internal_request", convert_to_internal_request, hooks.AROUND),
    (f"{_CHAT}._generate_chat_stream", generate_chat_stream, hooks.AROUND),
]
