"""The reference in HTTP answers: `choices[].output_store_ref`, in a stream in each choice's finish chunk.

It is added to what vLLM's handlers return, before that becomes bytes. The objects of completions and chat
take further fields; those of `/inference/v1/generate` do not, so its answer is dumped here.
"""
# pyright: reportMissingImports=false

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from radix_engine_plugins.streams import with_refs
from radix_transfer_plugins.responses import REF_KEY

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
        return with_refs(result, lambda: answer.by_choice(choice_index), _place)
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
            _place(choice, refs[choice["index"]])
    return _dumped(response, content)


def _dumped(response: Any, content: dict[str, Any]) -> Any:
    """An answer of the same kind whose dump is `content`."""

    class Dumped(type(response)):
        def model_dump(self, **_: Any) -> dict[str, Any]:
            return content

    return Dumped.model_construct()


def _place(choice: dict[str, Any], ref: dict[str, Any]) -> None:
    choice[REF_KEY] = ref
