"""Benchmarks of the output store."""
