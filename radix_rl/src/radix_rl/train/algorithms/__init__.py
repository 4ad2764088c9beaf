"""Advantage estimators, one module each: `advantages(rewards [n], group_ids [n]) -> [n]`, all float64
numpy."""
