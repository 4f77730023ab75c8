"""Benchmarks: `python -m benchmarks.NAME`; `make bench` and `make bench-gpu` run them all."""
