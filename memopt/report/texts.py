"""Figures as people read them."""

from __future__ import annotations


def format_seconds(time_s: float) -> str:
    """A duration in s, ms or µs."""
    if time_s >= 1:
        return f"{time_s:.2f} s"
    if time_s >= 1e-3:
        return f"{1e3 * time_s:.2f} ms"
    return f"{1e6 * time_s:.1f} µs"
