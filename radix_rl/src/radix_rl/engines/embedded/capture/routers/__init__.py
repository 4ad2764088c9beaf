"""Adapters that see which experts a model's routers pick.

base.py             the contract of an adapter
registry.py         which adapter a model takes
experts_call.py     experts called with the indices
router_scores.py    routers that return scores
"""
