"""Trackers: where metrics go, one file a destination.

base.py         the contract
factory.py      the trackers of a run by the `type` of their settings
json_lines.py   metrics.jsonl, which every run has
tensorboard.py  TensorBoard event files
wandb.py        Weights & Biases
"""

from radix_rl.observe.trackers.factory import create_trackers

__all__ = ["create_trackers"]
