"""Environments: problems to solve and a score for each answer, one file each.

base.py        the contract, and the order of records over epochs
factory.py     the environments by the `type` of their settings
arithmetic.py  word problems with sums of two numbers
gsm8k.py       grade-school word problems from a file or the hub
"""

from radix_rl.rollout.environments.factory import create_environment

__all__ = ["create_environment"]
