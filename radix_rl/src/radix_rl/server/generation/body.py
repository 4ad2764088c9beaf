"""The body of `/generate`: SGLang's `GenerateReqInput`, turned into engine requests.

Names that SGLang knows and this server does not support are accepted with the values that change nothing and
refused with any other; names that nobody knows are refused. Silence would hide a misspelt
`return_outputs_via_store`.
"""

import uuid
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from radix_rl.engines.base import EngineInfo
from radix_rl.errors import RequestError
from radix_rl.server.generation.sampling import (
    ParsedSampling,
    TextOptions,
    parse_sampling,
    refuse_unsupported,
)
from radix_rl.server.http import BodyError, decode_object
from radix_rl.types import GenerateRequest

T = TypeVar("T")

_MAX_SEQUENCES = 65536
"""Of one call: more would keep every other client waiting while they are only laid out."""

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


class Tokenizer(Protocol):
    """What the server uses of a Hugging Face tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Any, **options: Any) -> str: ...

    def convert_ids_to_tokens(self, token_id: int) -> str: ...


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    rid: str | list[str] | None = None
    session_id: str | None = None
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
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


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One engine request, and how its answer is rendered."""

    request: GenerateRequest
    text: TextOptions
    samples: int = 1
    """How many items share this one's prompt, one after the other."""
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False


class GenerateCall(msgspec.Struct, frozen=True, kw_only=True):
    items: list[Item]
    is_single: bool
    """The answer is one object, not a list."""
    stream: bool


def parse_generate(data: bytes, tokenizer: Tokenizer, info: EngineInfo) -> GenerateCall:
    """Raises RequestError, with the path of what is wrong, before anything is started."""
    return build_call(decode_object(data), tokenizer, info)


def build_call(raw: dict[str, Any], tokenizer: Tokenizer, info: EngineInfo) -> GenerateCall:
    """From a parsed `/generate` body; the OpenAI routes translate theirs into one."""
    body = _checked(raw)
    prompts, is_single = _prompts(body, tokenizer)
    num_prompts = len(prompts)
    sampling = [
        parse_sampling(raw, info.vocab_size)
        for raw in _spread(body.sampling_params, num_prompts, None, "sampling_params")
    ]
    counts = {parsed.n for parsed in sampling}
    if len(counts) > 1:
        raise RequestError(
            f"sampling_params.n: expected the same number for the whole batch, got {sorted(counts)}"
        )
    (n,) = counts
    if num_prompts * n > _MAX_SEQUENCES:
        raise RequestError(
            f"expected at most {_MAX_SEQUENCES} sequences in one call, got {num_prompts} prompts x n = {n}; "
            "split it"
        )
    request_ids = _request_ids(body.rid, num_prompts, n, is_single)
    return_logprob = _spread(body.return_logprob, num_prompts, False, "return_logprob")
    mask = _spread(body.return_sampling_mask, num_prompts, False, "return_sampling_mask")
    mode = _spread(body.sampling_logprobs_mode, num_prompts, None, "sampling_logprobs_mode")
    for start in _spread(body.logprob_start_len, num_prompts, -1, "logprob_start_len"):
        if start != -1:
            raise RequestError(
                f"logprob_start_len: log-probabilities of prompt tokens are not supported, got {start!r}; "
                "leave it out or give -1"
            )
    items = []
    for index, prompt in enumerate(prompts):
        for sample in range(n):
            request = _request(body, prompt, sampling[index], info, sample)
            request = msgspec.structs.replace(
                request,
                request_id=request_ids[index * n + sample],
                return_sampling_mask=mask[index],
                sampling_logprobs_mode=mode[index] or "selected",
            )
            items.append(
                Item(
                    request=request,
                    text=sampling[index].text,
                    samples=n,
                    return_logprob=return_logprob[index],
                    return_text_in_logprobs=bool(body.return_text_in_logprobs),
                    return_prompt_token_ids=bool(body.return_prompt_token_ids),
                )
            )
    return GenerateCall(items=items, is_single=is_single and n == 1, stream=bool(body.stream))


def _checked(raw: dict[str, Any]) -> _Body:
    raw = refuse_unsupported(raw, _UNSUPPORTED, "")
    try:
        return msgspec.convert({k: v for k, v in raw.items() if k not in _WITHOUT_EFFECT}, _Body)
    except msgspec.ValidationError as error:
        raise BodyError(f"{error}; known fields: {', '.join(_Body.__struct_fields__)}") from error


def _prompts(body: _Body, tokenizer: Tokenizer) -> tuple[list[list[int]], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("expected exactly one of text and input_ids")
    if body.text is not None:
        is_single = isinstance(body.text, str)
        texts = [body.text] if isinstance(body.text, str) else body.text
        prompts = [list(tokenizer.encode(text)) for text in texts]
    else:
        ids = body.input_ids or []
        is_single = bool(ids) and isinstance(ids[0], int)
        prompts = [ids] if is_single else ids
        if any(isinstance(item, list) == is_single for item in ids):
            raise RequestError(
                "input_ids: expected a list of token ids or a list of such lists, got a mixture"
            )
    if not prompts:
        raise RequestError("expected at least one prompt, got an empty list")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise RequestError(f"prompt {index} has no tokens; at least one is needed")
    return prompts, is_single  # type: ignore[return-value]


def _request(
    body: _Body, prompt: list[int], sampling: ParsedSampling, info: EngineInfo, sample: int
) -> GenerateRequest:
    if min(prompt) < 0 or max(prompt) >= info.vocab_size:
        raise RequestError(
            f"input_ids: expected ids in [0, {info.vocab_size}), got {min(prompt)} to {max(prompt)}"
        )
    room = info.context_length - len(prompt)
    params = sampling.params
    if sampling.unlimited:
        fitting = min(info.context_length, info.max_request_tokens or info.context_length) - len(prompt)
        longest = max(fitting, 0)
        shortest = min(params.min_new_tokens, longest)
        params = msgspec.structs.replace(params, max_new_tokens=longest, min_new_tokens=shortest)
    if room < 0:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, more than the context length of {info.context_length}; "
            "shorten it"
        )
    if params.max_new_tokens > room:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and max_new_tokens is {params.max_new_tokens}, "
            f"together more than the "
            f"context length of {info.context_length}; shorten the prompt or lower max_new_tokens"
        )
    if sample and params.seed is not None:
        # Samples of one prompt with one seed would all be the same.
        params = msgspec.structs.replace(params, seed=params.seed + sample)
    start = body.routed_experts_start_len or 0
    if not 0 <= start <= len(prompt):
        raise RequestError(
            f"routed_experts_start_len: expected 0 to {len(prompt)} (the prompt's tokens), got {start}"
        )
    return GenerateRequest(
        request_id="",
        input_ids=tuple(prompt),
        sampling=params,
        return_routed_experts=bool(body.return_routed_experts),
        routed_experts_start_len=start if body.return_routed_experts or body.return_indexer_topk else 0,
        return_indexer_topk=bool(body.return_indexer_topk),
        return_outputs_via_store=bool(body.return_outputs_via_store),
        session_id=body.session_id,
    )


def _request_ids(rid: str | list[str] | None, num_prompts: int, n: int, is_single: bool) -> list[str]:
    """Single: as given. A text for several: `<rid>_<index>`. A list: one a prompt, and `<rid>_<sample>` when
    n > 1.
    """
    total = num_prompts * n
    if rid is None:
        return [uuid.uuid4().hex for _ in range(total)]
    if isinstance(rid, str):
        return [rid] if is_single and n == 1 else [f"{rid}_{index}" for index in range(total)]
    if len(rid) != num_prompts:
        raise RequestError(f"rid: expected {num_prompts} ids, one a prompt, got {len(rid)}")
    if len(set(rid)) != len(rid):
        raise RequestError("rid: expected ids that differ, got one twice")
    return list(rid) if n == 1 else [f"{name}_{sample}" for name in rid for sample in range(n)]


def _spread(value: T | list[T] | None, count: int, default: Any, name: str) -> list[Any]:
    """One value for all, or one for each prompt."""
    if isinstance(value, list):
        if len(value) != count:
            raise RequestError(f"{name}: expected {count} values, one a prompt, got {len(value)}")
        return [default if item is None else item for item in value]
    return [default if value is None else value] * count
