"""What passes between the parts: requests and answers of an engine, samples of a rollout.

Token ids in, token ids out: nothing here is ever re-tokenized.
"""

from typing import Literal

import msgspec

from radix_engine_plugins.logprobs import LOGPROB_FLOOR as LOGPROB_FLOOR
from radix_transfer_plugins import StoreRef, TokenOutputStash


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Names and defaults of SGLang's `/generate`; its `n` is expanded before an engine sees a request."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: the whole vocabulary."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    """The same seed gives the same tokens whatever else runs in the batch. None: drawn by the engine."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sequence to generate."""

    request_id: str
    """Unique among running requests; `abort` takes it."""
    input_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    """Absolute first row wanted, in [0, prompt tokens]."""
    return_indexer_topk: bool = False
    return_sampling_mask: bool = False
    sampling_logprobs_mode: Literal["selected", "support"] = "selected"
    return_outputs_via_store: bool = False
    session_id: str | None = None
    """Requests of one session go to one engine."""


class FinishReason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    """The stop token id or stop string, for "stop"."""
    length: int | None = None
    """The limit that was reached, for "length"."""
    message: str | None = None
    """Why, for "abort"."""


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled under weight version `version`."""

    start: int
    end: int
    version: str


class GenerateOutput(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One finished sequence of P prompt and C output tokens. C may be 0.

    Exactly one of `outputs` (inline) and `output_store_ref` is set if replay outputs were asked for and there
    is something to deliver. The receiver owns the stored object and deletes it after its last read.
    """

    request_id: str
    prompt_tokens: int
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    """Of each sampled token under the distribution it was sampled from, `[C]`."""
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    weight_version: str | None = None
    """Of the weights that were in force at the end, also where no token was sampled; None: not told."""
    cached_tokens: int = 0
    """Prompt tokens whose key-value cache was reused."""
    num_retractions: int = 0
    """How often the request went back to the queue and was computed again."""
    outputs: TokenOutputStash | None = None
    routed_experts_start: int = 0
    """Absolute row of the first routed-experts row, as the engine used it."""
    output_store_ref: StoreRef | None = None


class PartialOutput(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A sequence that is still growing, as `Engine.stream` shows it: everything sampled so far."""

    request_id: str
    prompt_tokens: int
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]
    cached_tokens: int = 0
    num_retractions: int = 0
