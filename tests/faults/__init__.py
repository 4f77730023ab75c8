"""Faults injected into everything that memopt runs and keeps; docs/results/faults.md lists them."""
