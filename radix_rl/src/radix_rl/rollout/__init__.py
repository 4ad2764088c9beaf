"""Rollout: problems in, scored samples out.

generation.py      a step's samples: groups of requests, scores, errors
scoring.py         rewards, in threads beside generation, within a time limit
environments/      problems and rewards, one file an environment
session.py         a conversation of several turns that becomes one sample
sample.py          one sequence on its way from rollout to trainer
sample_builder.py  asks for the next piece of a sample and joins it to what is there
replay_index.py    which rows of which replay output lie where, for one sample
refs.py            the stored objects that samples own, and their deletion
metrics.py         figures of one rollout
"""
