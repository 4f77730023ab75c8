"""Figures as people read them."""

from __future__ import annotations

import re


def format_seconds(time_s: float) -> str:
    """A duration in s, ms or µs."""
    if time_s >= 1:
        return f"{time_s:.2f} s"
    if time_s >= 1e-3:
        return f"{1e3 * time_s:.2f} ms"
    return f"{1e6 * time_s:.1f} µs"


def counted(count: int, noun: str) -> str:
    """A number with its noun: "1 run", "2 runs"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, as one line."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0]
