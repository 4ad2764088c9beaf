"""Policy losses: one value for each token, before any reduction.

base.py       what a loss gets and gives; bounded ratios and the clipped surrogate that several share
ppo_clip.py   PPO's clipped surrogate, with DAPO's bounds too
gspo.py       the sequence's ratio in place of the token's
cispo.py      the clipped ratio as a constant weight
registry.py   the losses by the `type` of their settings
"""
