"""Bodies of OpenAI's routes, translated into the `/generate` body that means the same."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from radix_rl.errors import RequestError
from radix_rl.server.generation.sampling import refuse_unsupported
from radix_rl.server.http import BodyError

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

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "latest_reminder", "root")
"""SGLang's. Whether the model knows them is its chat template's matter."""

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


def parse_body(raw: dict[str, Any], body_type: type[BodyT]) -> BodyT:
    """Unknown names are refused, as on `/generate`."""
    raw = refuse_unsupported(raw, _UNSUPPORTED, "")
    try:
        body = msgspec.convert({k: v for k, v in raw.items() if k not in _WITHOUT_EFFECT}, body_type)
    except msgspec.ValidationError as error:
        raise BodyError(f"{error}; known fields: {', '.join(body_type.__struct_fields__)}") from error
    for name in ("return_outputs_via_store", "return_sampling_mask", "return_indexer_topk"):
        if getattr(body, name) and not body.return_meta_info:
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


def chat_call(body: ChatBody, tokenizer: Any) -> dict[str, Any]:
    """The `/generate` body, its prompt made by the tokenizer's chat template."""
    if body.tool_choice not in (None, "auto", "none"):
        raise RequestError(f"tool_choice: expected auto or none, got {body.tool_choice!r}")
    call = {"input_ids": _render(body, tokenizer), "return_logprob": bool(body.logprobs)}
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return call | _common(body, limit)


def _common(body: CommonBody, max_new_tokens: int | None) -> dict[str, Any]:
    sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    sampling |= {theirs: getattr(body, ours) for ours, theirs in _SAMPLING.items()}
    return {"sampling_params": sampling} | {name: getattr(body, name) for name in _PASSED_ON}


def _render(body: ChatBody, tokenizer: Any) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise RequestError("the model has no chat template; start the server with --chat-template FILE")
    try:
        rendered = tokenizer.apply_chat_template(
            [_plain_text(message) for message in body.messages],
            tools=None if body.tool_choice == "none" else body.tools,
            add_generation_prompt=not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            tokenize=True,
            return_dict=False,
            **(body.chat_template_kwargs or {}),
        )
    except RequestError:
        raise
    except Exception as error:
        # Templates are programs of the model's author, who refuses bad messages by exceptions of any kind.
        raise RequestError(f"messages: the chat template refuses them: {error}") from error
    return list(rendered)


def _plain_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Content parts of type text joined; the others, such as images, are refused."""
    content, role = message.get("content"), message.get("role")
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise BodyError(f"messages: expected a role of {', '.join(_ROLES)}, got {role!r}")
    if content is None and role == "user":
        raise BodyError("messages: expected content in a message of the user, got none")
    if not isinstance(content, list):
        return dict(message)
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise RequestError(f"messages: expected content parts of type text, got {part!r}")
        parts.append(str(part.get("text", "")))
    return dict(message) | {"content": "".join(parts)}
