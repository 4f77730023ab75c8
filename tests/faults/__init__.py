"""Faults injected into everything that memopt runs and keeps; docs/reliability.md lists them."""
