"""The reference in HTTP answers: `choices[].output_store_ref`, in a stream in each choice's finish chunk.

It is added to what vLLM's handlers return, before that becomes bytes. The objects of completions and chat
take further fields; those of `/inference/v1/generate` do not, so its answer is dumped here.
"""
# pyright: reportMissingImports=false

import json
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

REF_KEY = "output_store_ref"
_DATA = "data: "

ChoiceIndex = Callable[[str, int], int]
"""Index of a choice, from the engine's request id and the index of the sample."""


@dataclass
class Answer:
    """References of one HTTP request's completions that ended."""

    refs: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    """By the engine's request id and the index of the sample."""

    def by_choice(self, choice_index: ChoiceIndex) -> dict[int, dict[str, Any]]:
        return {choice_index(*key): ref for key, ref in self.refs.items()}


_current: ContextVar[Answer | None] = ContextVar("radix_vllm_answer", default=None)


def current_answer() -> Answer | None:
    """None: this context's request is of no route that has a place for references."""
    return _current.get()


async def answer_with_refs(handle: Callable[[], Any], choice_index: ChoiceIndex) -> Any:
    """What `handle` returns, with references: an answer, an error or the chunks of a stream."""
    answer = Answer()
    token = _current.set(answer)
    try:
        result = await handle()
    finally:
        _current.reset(token)
    if hasattr(result, "__aiter__"):
        return _stream_with_refs(result, answer, choice_index)
    if not hasattr(result, "choices"):
        return result
    return _with_refs(result, answer.by_choice(choice_index))


def _with_refs(response: Any, refs: dict[int, dict[str, Any]]) -> Any:
    if not refs:
        return response
    if response.choices[0].model_config.get("extra") == "allow":
        for choice in response.choices:
            if choice.index in refs:
                setattr(choice, REF_KEY, refs[choice.index])
        return response
    content = response.model_dump()
    for choice in content["choices"]:
        if choice["index"] in refs:
            choice[REF_KEY] = refs[choice["index"]]
    return _dumped(response, content)


def _dumped(response: Any, content: dict[str, Any]) -> Any:
    """An answer of the same kind whose dump is `content`."""

    class Dumped(type(response)):
        def model_dump(self, **_: Any) -> dict[str, Any]:
            return content

    return Dumped.model_construct()


async def _stream_with_refs(chunks: Any, answer: Answer, choice_index: ChoiceIndex) -> AsyncIterator[str]:
    try:
        async for chunk in chunks:
            # Most chunks are passed on unread.
            ends = answer.refs and '"finish_reason":"' in chunk
            yield _chunk_with_refs(chunk, answer.by_choice(choice_index)) if ends else chunk
    finally:
        await chunks.aclose()


def _chunk_with_refs(chunk: str, refs: dict[int, dict[str, Any]]) -> str:
    body = json.loads(chunk.removeprefix(_DATA))
    for choice in body["choices"]:
        if choice.get("finish_reason") is not None and choice["index"] in refs:
            choice[REF_KEY] = refs[choice["index"]]
    return f"{_DATA}{json.dumps(body, separators=(',', ':'))}\n\n"
