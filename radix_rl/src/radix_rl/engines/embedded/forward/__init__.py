"""The model and one pass through it.

model.py         loading a model, and what the engine needs to know of it
runner.py        one forward pass over running requests
trial.py         requests side by side, compared with each alone, before any is served
attention.py     attention that reads the slots
step_cache.py    the cache that a transformers model sees
segments.py      requests of equal length, computed together
"""
