"""Benchmarks that need a GPU; `python -m benchmarks gpu` runs them all."""
