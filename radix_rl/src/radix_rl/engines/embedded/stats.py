"""`EngineStats`: what the engine is doing, for metrics."""

import msgspec


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A glance at the engine, taken between two steps."""

    num_running: int
    num_waiting: int
    kv_cache_tokens: int
    """Capacity."""
    kv_cache_tokens_used: int
    prefix_cache_tokens_used: int
    generated_tokens: int
    """Since the start, as are the counters below."""
    prefilled_tokens: int
    sampling_mask_ids: int
    """Ids handed over in sampling masks."""
    non_finite_logprobs: int
    """Sampled tokens whose log-probability was replaced by the floor."""
    paused: str | None
    """Mode of the pause, or None."""
    weight_version: str | None
    """None: no weights are in force."""
