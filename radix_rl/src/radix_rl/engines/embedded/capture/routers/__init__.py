"""Adapters that see which experts a model's routers pick, one for each router interface."""
