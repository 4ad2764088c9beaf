"""Benchmarks of real inference engines, in the environments that the engine tests build."""
