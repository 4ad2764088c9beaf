"""Prometheus metrics of the server itself; those of the output store are in radix_engine_plugins.metrics."""

from typing import Protocol, runtime_checkable

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ServerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "radix_rl_requests", "Generation requests by outcome.", ["outcome"], registry=registry
        )
        """Outcomes: "answered", "refused" (4xx), "failed" (5xx), "disconnected"."""
        self.running = Gauge(
            "radix_rl_running_requests", "Sequences that clients wait for.", registry=registry
        )
        self.prompt_tokens = Counter(
            "radix_rl_prompt_tokens", "Prompt tokens of finished sequences.", registry=registry
        )
        self.output_tokens = Counter("radix_rl_output_tokens", "Sampled tokens.", registry=registry)
        self.cached_tokens = Counter(
            "radix_rl_cached_tokens", "Prompt tokens found in the cache.", registry=registry
        )
        self.seconds = Histogram(
            "radix_rl_request_seconds",
            "From a request's body to its answer.",
            buckets=_SECONDS,
            registry=registry,
        )


@runtime_checkable
class TellsStats(Protocol):
    """An engine that tells what it is doing, as a Struct whose numbers become gauges."""

    async def stats(self) -> msgspec.Struct: ...


def engine_registry(stats: msgspec.Struct) -> CollectorRegistry:
    """The numbers of `stats` as gauges `radix_rl_engine_<field>`."""
    registry = CollectorRegistry()
    for name, value in msgspec.structs.asdict(stats).items():
        if isinstance(value, int | float):
            Gauge(f"radix_rl_engine_{name}", f"{name} of the engine.", registry=registry).set(value)
    return registry
