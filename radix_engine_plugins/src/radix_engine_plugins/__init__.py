"""What runs inside an inference engine: collect replay outputs, write them to the store, clean up.

settings.py   what an operator asks for, and what `/server_info` says of it
fields.py     names that clients see, the same at every engine
versions.py   which versions of an engine a plugin runs in
session.py    one process's connection to the store
codecs.py     what a model's configuration says: experts, and how each field is stored
collector.py  rows of one request, gathered step by step
writer.py     puts and deletes beside an engine's event loop
put_queue.py  what waits to be put, and how it is batched
handover.py   who owns a stored object until its client has the reference
streams.py    references in streamed answers
logprobs.py   log-probabilities that are not finite
metrics.py    Prometheus metrics of the writing side
sglang/       the plugin for an unmodified SGLang
vllm/         the plugin for an unmodified vLLM
"""
