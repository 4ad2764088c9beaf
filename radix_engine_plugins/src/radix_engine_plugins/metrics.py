"""Prometheus metrics of the output store's writing side.

prometheus_client is imported when metrics are made and not before: engines with several processes set
PROMETHEUS_MULTIPROC_DIR while they start, and the library looks for it when it is imported.
"""

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SECONDS_BUCKETS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)


class OutputStoreMetrics:
    """Counts into the registry it is given. One instance a registry: Prometheus refuses a name twice."""

    def __init__(self, registry: "CollectorRegistry") -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self.registry = registry
        self.puts = Counter("output_store_puts", "Stashes stored.", registry=registry)
        self.put_failures = Counter(
            "output_store_put_failures", "Puts that the store refused.", registry=registry
        )
        self.put_bytes = Counter("output_store_put_bytes", "Encoded bytes stored.", registry=registry)
        self.put_seconds = Histogram(
            "output_store_put_seconds",
            "Seconds from the start of a put to its end, encoding included, waiting for a thread not.",
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self.pending_puts = Gauge(
            "output_store_pending_puts",
            "Puts that wait or run.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.discards = Counter(
            "output_store_discards",
            "Objects deleted because nobody was handed their reference.",
            registry=registry,
        )
        self.discard_failures = Counter(
            "output_store_discard_failures",
            "Objects that could not be deleted and wait for garbage collection.",
            registry=registry,
        )
        self.floored_logprobs = Counter(
            "output_store_floored_logprobs",
            "Log-probabilities beside stored outputs that were not finite and became the floor.",
            registry=registry,
        )


def own_metrics() -> OutputStoreMetrics:
    """In a registry of their own, for one writer."""
    from prometheus_client import CollectorRegistry

    return OutputStoreMetrics(CollectorRegistry())


@functools.cache
def engine_metrics() -> OutputStoreMetrics:
    """In the registry that the engine of this process answers `/metrics` from; all its writers share them."""
    from prometheus_client import REGISTRY

    return OutputStoreMetrics(REGISTRY)
