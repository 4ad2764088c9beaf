"""Tokens from logits.

sampler.py    temperature, top-k, top-p, min-p, penalties, log-probabilities, sampling masks
batch.py      the parameters of the requests that are sampled together
uniform.py    random numbers: from a request's seed and a token's position
"""
