"""Every benchmark: its name, and the module whose `run()` returns its results.

A new one is a file and a line here.
"""

BENCHMARKS = {
    "response_path": "benchmarks.store.response_path",
    "codecs": "benchmarks.store.codecs",
    "read_many_mooncake": "benchmarks.store.read_many_mooncake",
    "small_objects": "benchmarks.store.small_objects",
    "ray_object_store": "benchmarks.store.ray_object_store",
    "embedded_speed": "benchmarks.engines.embedded_speed",
    "embedded_context": "benchmarks.engines.embedded_context",
    "embedded_vllm": "benchmarks.engines.embedded_vllm",
}

ENGINE_BENCHMARKS = {
    "sglang_store": "benchmarks.engines.sglang_store",
    "vllm_store": "benchmarks.engines.vllm_store",
}
"""Against real engines, in the environments that `make test-engines` builds."""
