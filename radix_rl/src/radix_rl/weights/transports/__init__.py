"""Ways that buckets travel from trainer to engines; see `base.py`."""
