"""Engines: they take requests of token ids and give sampled tokens with their replay outputs.

base.py               the contract of every engine
weight_protocols.py   what a weight transport may ask of an engine beyond the contract
pool.py               many engines as one
fleet.py              one call to all engines of a pool
embedded/             the engine inside this process
remote/               a server (SGLang, vLLM or ours) behind HTTP
"""
