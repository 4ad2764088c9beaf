"""Replay: the trainer's forward pass takes the choices that the engine recorded.

assemble.py        recorded rows of samples as arrays: read once, only the rows in use
own_loop.py        routing replay for a training loop outside of this package
hooked.py          the life of a replay by forward hooks on one microbatch
experts.py         routing replay: the recorded experts of every MoE layer
indexers.py        indexer replay: the recorded positions of sparse attention
unrecorded.py      rows without a recorded choice, and how many a run allows
counts.py          what replay counts over the microbatches of a step
"""
