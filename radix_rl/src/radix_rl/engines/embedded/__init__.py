"""The engine inside this process: PyTorch and transformers, on a CPU or a GPU.

engine.py      `EmbeddedEngine`, the contract; runs on the event loop
worker.py      the thread that owns model, cache and scheduler
inbox.py       new requests on their way from event loops, in a fixed order
outbox.py      results on their way back to event loops
core.py        a step (schedule, forward, sample), pauses, weight versions, sleep, health
device.py      where the model lies
step.py        the tokens of one forward pass
outputs.py     a finished request's answer, with its replay rows
weights.py     new weights, staged and committed
build.py       an engine from its configuration
config.py      the settings
stats.py       figures for metrics
schedule/      queue, slots, chunks of prompts, ends
cache/         memory for keys and values
forward/       the model and its attention
sampling/      tokens from logits, random numbers
capture/       replay rows of routers and indexers
shortcuts/     faster ways through a model's modules
"""
