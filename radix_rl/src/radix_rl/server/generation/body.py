"""The body of `/generate`: SGLang's `GenerateReqInput`, turned into engine requests.

Names that SGLang knows and this server does not support are accepted with the values that change nothing and
refused with any other; names that nobody knows are refused. Silence would hide a misspelt
`return_outputs_via_store`.
"""

from array import array
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from radix_rl.engines.base import EngineInfo
from radix_rl.errors import RequestError
from radix_rl.server.generation.sampling import ParsedSampling, parse_sampling, refuse_unsupported
from radix_rl.server.http import BodyError, decode_object
from radix_rl.server.items import GenerateCall, Prompt, Tokenizer
from radix_rl.types import GenerateRequest, SamplingParams

T = TypeVar("T")

MAX_SEQUENCES = 65536
"""Of one call."""

_TokenId = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Whether the model knows it is the engine's matter."""

_NO = (None, False)
_NONE = (None, [], {})
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "input_embeds": _NONE,
    "image_data": _NONE,
    "video_data": _NONE,
    "audio_data": _NONE,
    "mm_hashes": _NONE,
    "mm_content_hashes": _NONE,
    "use_audio_in_video": _NO,
    "video_config": _NONE,
    "watermark": _NONE,
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": _NONE,
    "return_flat_raw_top_logprobs": _NO,
    "return_flat_raw_output_top_logprobs": _NO,
    "return_flat_raw_top_logprobs_b64": _NO,
    "return_hidden_states": _NO,
    "modalities": _NONE,
    "session_params": _NONE,
    "lora_path": _NONE,
    "lora_id": _NONE,
    "custom_logit_processor": _NONE,
    "positional_embed_overrides": _NONE,
    "bootstrap_host": _NONE,
    "bootstrap_port": _NONE,
    "bootstrap_room": _NONE,
    "bootstrap_pair_key": _NONE,
    "decode_tp_size": _NONE,
    "disagg_prefill_dp_rank": _NONE,
    "http_worker_ipc": _NONE,
    "background": _NO,
    "require_reasoning": _NO,
    "max_thinking_tokens": _NONE,
    "priority": (None, 0),
    "extra_key": (None, ""),
    "cache_salt": (None, ""),
    "return_bytes": _NO,
    "return_entropy": _NO,
    "need_wait_for_mm_inputs": _NO,
    "num_items_assigned": _NONE,
    "encoder_urls": _NONE,
    "max_dynamic_patch": _NONE,
    "min_dynamic_patch": _NONE,
    "image_max_dynamic_patch": _NONE,
    "video_max_dynamic_patch": _NONE,
    "images_config": _NONE,
    "mm_processor_kwargs": _NONE,
    "multi_item_delimiter_indices": _NONE,
    "token_indices_to_pool": _NONE,
    "kv_hints": _NONE,
}

_WITHOUT_EFFECT = frozenset(
    {
        "log_metrics",
        "no_logs",
        "custom_labels",
        "conversation_id",
        "routing_key",
        "routed_dp_rank",
        "data_parallel_rank",
        "external_trace_header",
        "received_time",
    }
)
"""Names of SGLang about logging and routing between servers: they change no answer and are ignored."""


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    rid: str | list[str] | None = None
    session_id: str | None = None
    text: str | list[str] | None = None
    input_ids: list[_TokenId | list[_TokenId]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_sampling_mask: bool | list[bool] | None = None
    sampling_logprobs_mode: (
        Literal["selected", "support"] | list[Literal["selected", "support"] | None] | None
    ) = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = None
    return_indexer_topk: bool | None = None
    return_outputs_via_store: bool | None = None
    stream: bool | None = None


def parse_generate(tokenizer: Callable[[], Tokenizer], data: bytes, info: EngineInfo) -> GenerateCall:
    """The call that a body of `/generate` is. `tokenizer` is asked for where there is text.

    Raises RequestError with the path of what is wrong.
    """
    return build_call(decode_object(data), tokenizer, info)


def build_call(raw: dict[str, Any], tokenizer: Callable[[], Tokenizer], info: EngineInfo) -> GenerateCall:
    """From a decoded `/generate` body; the OpenAI routes translate theirs into one."""
    body = _checked(raw)
    num_prompts, is_list = _count_prompts(body)
    sampling = [
        parse_sampling(raw) for raw in _spread(body.sampling_params, num_prompts, None, "sampling_params")
    ]
    samples = _samples(sampling, num_prompts)
    _check_rid(body.rid, num_prompts)
    return_logprob = _spread(body.return_logprob, num_prompts, False, "return_logprob")
    mask = _spread(body.return_sampling_mask, num_prompts, False, "return_sampling_mask")
    mode = _spread(body.sampling_logprobs_mode, num_prompts, None, "sampling_logprobs_mode")
    for start in _spread(body.logprob_start_len, num_prompts, -1, "logprob_start_len"):
        if start != -1:
            raise RequestError(
                f"logprob_start_len: log-probabilities of prompt tokens are not supported, got {start!r}; "
                "leave it out or give -1"
            )
    common = GenerateRequest(
        request_id="",
        input_ids=(),
        return_routed_experts=bool(body.return_routed_experts),
        routed_experts_start_len=(body.routed_experts_start_len or 0)
        if body.return_routed_experts or body.return_indexer_topk
        else 0,
        return_indexer_topk=bool(body.return_indexer_topk),
        return_outputs_via_store=bool(body.return_outputs_via_store),
        session_id=body.session_id,
    )
    prompts = [
        Prompt(
            token_ids=token_ids,
            request=msgspec.structs.replace(
                common,
                sampling=_sampling(sampling[index], len(token_ids), info),
                return_sampling_mask=mask[index],
                sampling_logprobs_mode=mode[index] or "selected",
            ),
            text=sampling[index].text,
            return_logprob=return_logprob[index],
        )
        for index, token_ids in enumerate(_token_ids(body, tokenizer, info))
    ]
    return GenerateCall(
        prompts=prompts,
        samples=samples,
        stream=bool(body.stream),
        is_list=is_list,
        rid=body.rid,
        return_text_in_logprobs=bool(body.return_text_in_logprobs),
        return_prompt_token_ids=bool(body.return_prompt_token_ids),
    )


def _checked(raw: dict[str, Any]) -> _Body:
    raw = refuse_unsupported(raw, _UNSUPPORTED, "")
    try:
        return msgspec.convert({k: v for k, v in raw.items() if k not in _WITHOUT_EFFECT}, _Body)
    except msgspec.ValidationError as error:
        raise BodyError(f"{error}; known fields: {', '.join(_Body.__struct_fields__)}") from error


def _count_prompts(body: _Body) -> tuple[int, bool]:
    """How many prompts there are, and whether they came as a list. No prompt is looked at."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("expected exactly one of text and input_ids")
    if body.text is not None:
        return (1, False) if isinstance(body.text, str) else (_at_least_one(len(body.text)), True)
    ids = body.input_ids or []
    is_list = not (ids and isinstance(ids[0], int))
    if any(isinstance(item, list) != is_list for item in ids):
        raise RequestError("input_ids: expected a list of token ids or a list of such lists, got a mixture")
    return (_at_least_one(len(ids)), True) if is_list else (1, False)


def _at_least_one(count: int) -> int:
    if not count:
        raise RequestError("expected at least one prompt, got an empty list")
    if count > MAX_SEQUENCES:
        raise RequestError(f"expected at most {MAX_SEQUENCES} prompts in one call, got {count}; split it")
    return count


def _samples(sampling: list[ParsedSampling], num_prompts: int) -> int:
    counts = {parsed.n for parsed in sampling}
    if len(counts) > 1:
        raise RequestError(
            f"sampling_params.n: expected the same number for the whole batch, got {sorted(counts)}"
        )
    (samples,) = counts
    if num_prompts * samples > MAX_SEQUENCES:
        raise RequestError(
            f"expected at most {MAX_SEQUENCES} sequences in one call, got {num_prompts} prompts x n = "
            f"{samples}; split it"
        )
    return samples


def _token_ids(body: _Body, tokenizer: Callable[[], Tokenizer], info: EngineInfo) -> Iterator[array]:
    """Of each prompt. One that is longer than any prompt may be is refused before it is tokenized."""
    prompts: Any = body.input_ids if body.text is None else body.text
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            check_text_length(prompt, tokenizer(), info)
            prompt = tokenizer().encode(prompt)
        if not prompt:
            raise RequestError(f"prompt {index} has no tokens; at least one is needed")
        if len(prompt) > (info.context_length or len(prompt)):
            raise RequestError(
                f"prompt {index} has {len(prompt)} tokens, more than the context length of "
                f"{info.context_length}; shorten it"
            )
        yield array("q", prompt)


def check_text_length(text: str, tokenizer: Tokenizer, info: EngineInfo) -> None:
    """Refuse text that cannot fit whatever its tokens are, before they are made. Raises RequestError."""
    if len(text) <= info.context_length or not info.context_length:
        return
    limit = info.context_length * longest_token(tokenizer)
    if len(text) > limit:
        raise RequestError(
            f"the text has {len(text)} characters, more than the {limit} that a context length of "
            f"{info.context_length} tokens can hold; shorten it"
        )


@lru_cache(maxsize=4)
def longest_token(tokenizer: Tokenizer) -> int:
    """Characters of the longest entry of the vocabulary."""
    return max((len(piece) for piece in tokenizer.get_vocab()), default=1)


def _sampling(parsed: ParsedSampling, num_tokens: int, info: EngineInfo) -> SamplingParams:
    """Without a limit on the new tokens: as many as there is room for."""
    params = parsed.params
    if not parsed.unlimited:
        return params
    fitting = min(info.context_length, info.max_request_tokens or info.context_length) - num_tokens
    longest = max(fitting, 0)
    shortest = min(params.min_new_tokens, longest)
    return msgspec.structs.replace(params, max_new_tokens=longest, min_new_tokens=shortest)


def _check_rid(rid: str | list[str] | None, num_prompts: int) -> None:
    if not isinstance(rid, list):
        return
    if len(rid) != num_prompts:
        raise RequestError(f"rid: expected {num_prompts} ids, one a prompt, got {len(rid)}")
    if len(set(rid)) != len(rid):
        raise RequestError("rid: expected ids that differ, got one twice")


def _spread(value: T | list[T] | None, count: int, default: Any, name: str) -> list[Any]:
    """One value for all, or one for each prompt."""
    if isinstance(value, list):
        if len(value) != count:
            raise RequestError(f"{name}: expected {count} values, one a prompt, got {len(value)}")
        return [default if item is None else item for item in value]
    return [default if value is None else value] * count
