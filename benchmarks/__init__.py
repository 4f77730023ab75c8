"""Benchmarks: `python -m benchmarks.NAME`; `make bench` runs them all, `make bench-gpu` those for CUDA."""
