"""Checks a request before it enters the queue, so that what can never be answered fails at once."""

from radix_rl.engines.embedded.cache.slots import round_up_tokens
from radix_rl.errors import RequestError
from radix_rl.types import GenerateRequest, SamplingParams


class RequestLimits:
    """What one engine can serve."""

    def __init__(
        self,
        *,
        vocab_size: int,
        context_length: int,
        kv_cache_tokens: int,
        captured_fields: frozenset[str],
        has_store: bool,
        has_tokenizer: bool,
    ) -> None:
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._kv_cache_tokens = kv_cache_tokens
        self._captured_fields = captured_fields
        self._has_store = has_store
        self._has_tokenizer = has_tokenizer

    def check(self, request: GenerateRequest) -> None:
        """Raises RequestError naming the limit, what was asked for and the remedy."""
        check_sampling(request.sampling)
        self._check_tokens(request)
        self._check_outputs(request)
        if request.sampling.stop and not self._has_tokenizer:
            raise RequestError(
                "stop: the engine has no tokenizer and cannot match stop strings; use stop_token_ids, or set "
                "tokenizer_path"
            )

    def _check_tokens(self, request: GenerateRequest) -> None:
        prompt = len(request.input_ids)
        if prompt == 0:
            raise RequestError("input_ids: expected at least one token, got none")
        lowest, highest = min(request.input_ids), max(request.input_ids)
        if lowest < 0 or highest >= self._vocab_size:
            bad = lowest if lowest < 0 else highest
            raise RequestError(f"input_ids: expected ids in [0, {self._vocab_size}), got {bad}")
        for token in request.sampling.stop_token_ids:
            if not 0 <= token < self._vocab_size:
                raise RequestError(f"stop_token_ids: expected ids in [0, {self._vocab_size}), got {token}")
        new = request.sampling.max_new_tokens
        if prompt > self._context_length or round_up_tokens(prompt) > self._kv_cache_tokens:
            limit = min(self._context_length, self._kv_cache_tokens)
            raise RequestError(
                f"input_ids: {prompt} prompt tokens alone are over the {limit} that a request may have; "
                "shorten the prompt"
            )
        if prompt + new > self._context_length:
            raise RequestError(
                f"{prompt} prompt tokens and max_new_tokens={new} make {prompt + new}, over the context "
                "length of "
                f"{self._context_length}; shorten the prompt or lower max_new_tokens to "
                f"{self._context_length - prompt}"
            )
        reserved = round_up_tokens(prompt + max(new - 1, 0))
        if reserved > self._kv_cache_tokens:
            raise RequestError(
                f"{prompt} prompt tokens and max_new_tokens={new} need a cache of {reserved} tokens, but the "
                "engine's holds "
                f"{self._kv_cache_tokens}; raise kv_cache_tokens or lower max_new_tokens"
            )

    def _check_outputs(self, request: GenerateRequest) -> None:
        if request.return_routed_experts and "routed_experts" not in self._captured_fields:
            raise RequestError(
                "return_routed_experts: the engine runs without enable_return_routed_experts; start it with "
                "that on"
            )
        if request.return_indexer_topk and "indexer_topk" not in self._captured_fields:
            raise RequestError(
                "return_indexer_topk: the engine runs without enable_return_indexer_topk; start it with that "
                "on"
            )
        start, prompt = request.routed_experts_start_len, len(request.input_ids)
        if not 0 <= start <= prompt:
            raise RequestError(
                f"routed_experts_start_len: expected 0 to the {prompt} prompt tokens, got {start}"
            )
        if request.return_outputs_via_store and not self._has_store:
            raise RequestError(
                "return_outputs_via_store: the engine runs without an output store; start it with one, or "
                "leave this off"
            )


def check_sampling(params: SamplingParams) -> None:
    """Ranges of every sampling parameter. Raises RequestError."""

    def expect(condition: bool, name: str, expected: str) -> None:
        if not condition:
            raise RequestError(f"{name}: expected {expected}, got {getattr(params, name)!r}")

    expect(params.max_new_tokens >= 0, "max_new_tokens", "0 or more")
    expect(0 <= params.min_new_tokens <= params.max_new_tokens, "min_new_tokens", "0 to max_new_tokens")
    expect(0.0 <= params.temperature < float("inf"), "temperature", "0 (greedy) or more")
    expect(0.0 < params.top_p <= 1.0, "top_p", "a number in (0, 1]")
    expect(params.top_k == -1 or params.top_k >= 1, "top_k", "-1 (whole vocabulary) or at least 1")
    expect(0.0 <= params.min_p <= 1.0, "min_p", "a number in [0, 1]")
    expect(-2.0 <= params.frequency_penalty <= 2.0, "frequency_penalty", "a number in [-2, 2]")
    expect(-2.0 <= params.presence_penalty <= 2.0, "presence_penalty", "a number in [-2, 2]")
    expect(0.0 < params.repetition_penalty <= 2.0, "repetition_penalty", "a number in (0, 2]")
    expect(all(params.stop), "stop", "strings that are not empty")
