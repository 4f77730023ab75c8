"""Benchmarks: `python -m benchmarks.NAME`; `make bench` runs them all."""
