"""Benchmarks: `python -m benchmarks [--only NAME]` from the repository root. See benchmarks/README.md."""
