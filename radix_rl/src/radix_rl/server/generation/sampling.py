"""`sampling_params` of a `/generate` request: SGLang's names and defaults. Ranges are the engine's matter."""

from typing import Any

import msgspec

from radix_rl.errors import RequestError
from radix_rl.server.items import TextOptions
from radix_rl.types import SamplingParams

_GREEDY_BELOW = 1e-6

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "json_schema": (None, ""),
    "regex": (None, ""),
    "ebnf": (None, ""),
    "structural_tag": (None, ""),
    "stop_regex": (None, "", []),
    "beam_width": (None, 1),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "watermark": (None,),
    "stream_interval": (None, 1),
}
"""Names of SGLang that are accepted with the values that change nothing, and refused with any other."""


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    sampling_seed: int | None = None
    n: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None


class ParsedSampling(msgspec.Struct, frozen=True, kw_only=True):
    params: SamplingParams
    """`max_new_tokens` is the one asked for; `unlimited` says that none was."""
    unlimited: bool
    n: int
    text: TextOptions


def refuse_unsupported(
    raw: dict[str, Any], unsupported: dict[str, tuple[Any, ...]], where: str
) -> dict[str, Any]:
    """`raw` without the names of `unsupported`, each of which must hold one of its neutral values."""
    for name, neutral in unsupported.items():
        if name in raw and raw[name] not in neutral:
            raise RequestError(
                f"{where}{name}: not supported by this server, got {raw[name]!r}; leave it out"
            )
    return {name: value for name, value in raw.items() if name not in unsupported}


def parse_sampling(raw: Any) -> ParsedSampling:
    """None is an empty object; a null value is the default. Raises RequestError naming the parameter."""
    raw = {} if raw is None else raw
    if not isinstance(raw, dict):
        raise RequestError(f"sampling_params: expected an object, got {type(raw).__name__}")
    try:
        body = msgspec.convert(refuse_unsupported(raw, _UNSUPPORTED, "sampling_params."), _Body)
    except msgspec.ValidationError as error:
        known = ", ".join(_Body.__struct_fields__)
        raise RequestError(f"sampling_params: {error}; known parameters: {known}") from error
    if body.seed is not None and body.sampling_seed is not None and body.seed != body.sampling_seed:
        raise RequestError(
            f"sampling_params: seed {body.seed} and sampling_seed {body.sampling_seed} differ; give one"
        )
    given = {name: getattr(body, name) for name in _PLAIN if getattr(body, name) is not None}
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    params = SamplingParams(
        **given,
        max_new_tokens=128 if body.max_new_tokens is None else body.max_new_tokens,
        stop=tuple(text for text in stop if text),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        seed=body.seed if body.seed is not None else body.sampling_seed,
    )
    if 0 <= params.temperature < _GREEDY_BELOW:
        params = msgspec.structs.replace(params, temperature=0.0)
    unlimited = body.max_new_tokens is None
    n = 1 if body.n is None else body.n
    if n < 1:
        raise RequestError(f"sampling_params.n: expected at least 1, got {n}")
    text = {
        name: getattr(body, name) for name in TextOptions.__struct_fields__ if getattr(body, name) is not None
    }
    return ParsedSampling(params=params, unlimited=unlimited, n=n, text=TextOptions(**text))


_PLAIN = (
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
)
