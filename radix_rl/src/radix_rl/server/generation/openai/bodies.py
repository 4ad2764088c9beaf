"""Bodies of OpenAI's routes, translated into the `/generate` body that means the same."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from radix_rl.engines.base import EngineInfo
from radix_rl.errors import RequestError
from radix_rl.server.generation.body import build_call
from radix_rl.server.generation.openai.chat_template import render_chat
from radix_rl.server.generation.sampling import refuse_unsupported
from radix_rl.server.http import BodyError, decode_object
from radix_rl.server.items import GenerateCall, Tokenizer

_NONE = (None, [], {}, "")
_NO = (None, False)
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": _NO,
    "suffix": _NONE,
    "top_logprobs": (None, 0),
    "logit_bias": _NONE,
    "response_format": (None, {"type": "text"}),
    "functions": _NONE,
    "function_call": _NONE,
    "modalities": (None, ["text"]),
    "audio": _NONE,
    "prediction": _NONE,
    "web_search_options": _NONE,
    "reasoning_effort": _NONE,
    "verbosity": _NONE,
    "json_schema": _NONE,
    "regex": _NONE,
    "ebnf": _NONE,
    "stop_regex": _NONE,
    "lora_path": _NONE,
    "session_params": _NONE,
    "custom_params": _NONE,
    "custom_logit_processor": _NONE,
    "watermark": _NONE,
    "extra_key": _NONE,
    "cache_salt": _NONE,
    "priority": (None, 0),
    "return_hidden_states": _NO,
    "return_cached_tokens_details": _NO,
    "return_spec_tokens_details": _NO,
}

_WITHOUT_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "custom_labels",
        "parallel_tool_calls",
        "separate_reasoning",
        "stream_reasoning",
        "data_parallel_rank",
        "routed_dp_rank",
    }
)
"""About accounting, routing, or the parsing of tool calls and reasoning, which is left to the client."""


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = False


class CommonBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: str | list[str] | None = None
    session_id: str | None = None
    return_meta_info: bool = False
    return_token_ids: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    return_indexer_topk: bool = False
    return_sampling_mask: bool = False
    sampling_logprobs_mode: str | None = None
    return_outputs_via_store: bool = False

    @property
    def wants_meta_info(self) -> bool:
        """`meta_info` is the only place of an answer that holds a reference: asking for one asks for both."""
        return self.return_meta_info or self.return_outputs_via_store

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(CommonBody, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None


class ChatBody(CommonBody, kw_only=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False


BodyT = TypeVar("BodyT", bound=CommonBody)

_SAMPLING = {
    "n": "n",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "min_tokens": "min_new_tokens",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "no_stop_trim": "no_stop_trim",
    "skip_special_tokens": "skip_special_tokens",
}
"""OpenAI's name -> `/generate`'s."""

_PASSED_ON = (
    "rid",
    "session_id",
    "stream",
    "return_routed_experts",
    "routed_experts_start_len",
    "return_indexer_topk",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "return_outputs_via_store",
)


def parse_completion(
    tokenizer: Callable[[], Tokenizer], data: bytes, info: EngineInfo
) -> tuple[GenerateCall, CompletionBody]:
    """The call that a body of `/v1/completions` is, and the body without its prompt. Raises RequestError."""
    body = _checked(decode_object(data), CompletionBody)
    call = build_call(completion_call(body), tokenizer, info)
    return call, msgspec.structs.replace(body, prompt="")


def parse_chat(tokenizer: Callable[[], Any], data: bytes, info: EngineInfo) -> tuple[GenerateCall, ChatBody]:
    """The call that a body of `/v1/chat/completions` is, and the body without its messages and tools.

    Renders the model's template, which may take any time: for a side process. Raises RequestError.
    """
    body = _checked(decode_object(data), ChatBody)
    call = build_call(chat_call(body, tokenizer(), info), tokenizer, info)
    return call, msgspec.structs.replace(body, messages=[], tools=None)


def _checked(raw: dict[str, Any], body_type: type[BodyT]) -> BodyT:
    """Unknown names are refused, as on `/generate`."""
    raw = refuse_unsupported(raw, _UNSUPPORTED, "")
    try:
        body = msgspec.convert({k: v for k, v in raw.items() if k not in _WITHOUT_EFFECT}, body_type)
    except msgspec.ValidationError as error:
        raise BodyError(f"{error}; known fields: {', '.join(body_type.__struct_fields__)}") from error
    for name in ("return_sampling_mask", "return_indexer_topk"):
        if getattr(body, name) and not body.wants_meta_info:
            raise RequestError(f"{name} needs return_meta_info: true; its answer is in choices[].meta_info")
    return body


def completion_call(body: CompletionBody) -> dict[str, Any]:
    """The `/generate` body. OpenAI's default of 16 tokens."""
    if body.logprobs not in (None, 0):
        raise RequestError(f"logprobs: expected 0 (of the sampled tokens), got {body.logprobs!r}")
    if body.max_tokens is not None and body.max_tokens < 1:
        raise BodyError(f"max_tokens: expected at least 1, got {body.max_tokens!r}")
    prompt = body.prompt
    is_text = isinstance(prompt, str) or bool(prompt and isinstance(prompt[0], str))
    call = {"text" if is_text else "input_ids": prompt, "return_logprob": body.logprobs is not None}
    return call | _common(body, 16 if body.max_tokens is None else body.max_tokens)


def chat_call(body: ChatBody, tokenizer: Any, info: EngineInfo) -> dict[str, Any]:
    """The `/generate` body, its prompt made by the tokenizer's chat template."""
    if body.tool_choice not in (None, "auto", "none"):
        raise RequestError(f"tool_choice: expected auto or none, got {body.tool_choice!r}")
    tools = None if body.tool_choice == "none" else body.tools
    prompt = render_chat(
        body.messages,
        tokenizer,
        info,
        tools=tools,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs or {},
    )
    call = {"input_ids": prompt, "return_logprob": bool(body.logprobs)}
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return call | _common(body, limit)


def _common(body: CommonBody, max_new_tokens: int | None) -> dict[str, Any]:
    sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    sampling |= {theirs: getattr(body, ours) for ours, theirs in _SAMPLING.items()}
    return {"sampling_params": sampling} | {name: getattr(body, name) for name in _PASSED_ON}
