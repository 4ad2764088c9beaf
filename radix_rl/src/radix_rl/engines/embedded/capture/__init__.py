"""Replay rows: what routers and indexers chose for each token.

rows.py        rows on their way into the slots, and out of them
indexers.py    the keys that sparse attention kept
"""
