"""Checks a request before it enters the queue, so that what can never be answered fails at once."""

from radix_rl.engines.embedded.cache.slots import round_up_tokens
from radix_rl.errors import RequestError
from radix_rl.types import GenerateRequest, SamplingParams

MAX_STOP_STRINGS = 32
"""Each is looked for in the text of every step."""


class RequestLimits:
    """What one engine can serve."""

    def __init__(
        self,
        *,
        vocab_size: int,
        context_length: int,
        kv_cache_tokens: int,
        sampling_mask_max_tokens: int,
        has_tokenizer: bool,
    ) -> None:
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._kv_cache_tokens = kv_cache_tokens
        self._sampling_mask_max_tokens = sampling_mask_max_tokens
        self._has_tokenizer = has_tokenizer

    def check(self, request: GenerateRequest) -> None:
        """Raises RequestError naming the limit, what was asked for and the remedy."""
        check_sampling(request.sampling)
        self._check_tokens(request)
        if request.return_sampling_mask:
            self._check_mask(request.sampling)
        if request.sampling.stop and not self._has_tokenizer:
            raise RequestError(
                "sampling_params.stop: the engine has no tokenizer and cannot match stop strings; use "
                "stop_token_ids, or set tokenizer_path"
            )

    def _check_tokens(self, request: GenerateRequest) -> None:
        """Lengths first: ids are looked at only where there are few enough."""
        prompt, new = len(request.input_ids), request.sampling.max_new_tokens
        if prompt == 0:
            raise RequestError("input_ids: expected at least one token, got none")
        self._check_lengths(prompt, new)
        lowest, highest = min(request.input_ids), max(request.input_ids)
        if lowest < 0 or highest >= self._vocab_size:
            bad = lowest if lowest < 0 else highest
            raise RequestError(f"input_ids: expected ids in [0, {self._vocab_size}), got {bad}")
        for token in request.sampling.stop_token_ids:
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"sampling_params.stop_token_ids: expected ids in [0, {self._vocab_size}), got {token}"
                )
        start = request.routed_experts_start_len
        if not 0 <= start <= prompt:
            raise RequestError(
                f"routed_experts_start_len: expected 0 to {prompt} (the prompt's tokens), got {start}"
            )

    def _check_lengths(self, prompt: int, new: int) -> None:
        if prompt > self._context_length:
            raise RequestError(
                f"input_ids: {prompt} prompt tokens alone are over the context length of "
                f"{self._context_length}; shorten the prompt"
            )
        if prompt + new > self._context_length:
            raise RequestError(
                f"{prompt} prompt tokens and max_new_tokens={new} make {prompt + new}, over the context "
                f"length of {self._context_length}; shorten the prompt or lower max_new_tokens to "
                f"{self._context_length - prompt}"
            )
        reserved = round_up_tokens(prompt + max(new - 1, 0))
        if reserved > self._kv_cache_tokens:
            raise RequestError(
                f"{prompt} prompt tokens and max_new_tokens={new} need a cache of {reserved} tokens, but the "
                f"engine's holds {self._kv_cache_tokens}; raise kv_cache_tokens, shorten the prompt or lower "
                "max_new_tokens"
            )

    def _check_mask(self, params: SamplingParams) -> None:
        greedy = params.temperature == 0.0
        most = 1 if greedy else min(self._vocab_size, params.top_k if params.top_k > 0 else self._vocab_size)
        if most > self._sampling_mask_max_tokens:
            raise RequestError(
                f"return_sampling_mask: with top_k={params.top_k} the mask of a token may hold {most} ids, "
                f"over the engine's sampling_mask_max_tokens={self._sampling_mask_max_tokens}; set top_k to "
                "that or less (in a run rollout.sampling.top_k), raise sampling_mask_max_tokens (in a run "
                "engine.sampling_mask_max_tokens), or ask for no mask (train.replay_sampling_mask=false)"
            )


def check_sampling(params: SamplingParams) -> None:
    """Ranges of every sampling parameter. Raises RequestError."""

    def expect(condition: bool, name: str, expected: str) -> None:
        if not condition:
            raise RequestError(f"sampling_params.{name}: expected {expected}, got {getattr(params, name)!r}")

    expect(params.max_new_tokens >= 0, "max_new_tokens", "0 or more")
    limit = params.max_new_tokens
    expect(0 <= params.min_new_tokens <= limit, "min_new_tokens", f"0 to max_new_tokens, {limit},")
    expect(0.0 <= params.temperature < float("inf"), "temperature", "0 (greedy) or more")
    expect(0.0 < params.top_p <= 1.0, "top_p", "a number in (0, 1]")
    expect(params.top_k == -1 or params.top_k >= 1, "top_k", "-1 (whole vocabulary) or at least 1")
    expect(0.0 <= params.min_p <= 1.0, "min_p", "a number in [0, 1]")
    expect(-2.0 <= params.frequency_penalty <= 2.0, "frequency_penalty", "a number in [-2, 2]")
    expect(-2.0 <= params.presence_penalty <= 2.0, "presence_penalty", "a number in [-2, 2]")
    expect(0.0 < params.repetition_penalty <= 2.0, "repetition_penalty", "a number in (0, 2]")
    expect(all(params.stop), "stop", "strings that are not empty")
    expect(len(params.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
    expect(params.seed is None or -(2**63) <= params.seed < 2**63, "seed", "a 64-bit integer")
