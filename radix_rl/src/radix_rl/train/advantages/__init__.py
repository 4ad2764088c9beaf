"""Advantages: rewards of a step's samples as training signals, one file an estimator.

registry.py      the estimators by the names of `algorithm.advantage`
grpo.py          reward minus the group's mean, over the group's standard deviation
dr_grpo.py       reward minus the group's mean
rloo.py          reward minus the mean of the group's other samples
reinforce_pp.py  rewards normalised over the whole step
groups.py        means and sizes of groups
"""
