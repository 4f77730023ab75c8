"""Figures and tables as text for people."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def format_seconds(time_s: float) -> str:
    """Format a duration in s, ms or µs."""
    if time_s >= 1:
        return f"{time_s:.2f} s"
    if time_s >= 1e-3:
        return f"{1e3 * time_s:.2f} ms"
    return f"{1e6 * time_s:.1f} µs"


def or_dash(value: T | None, write: Callable[[T], str]) -> str:
    """Format a value; "-" for None."""
    return "-" if value is None else write(value)


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Format a table's lines: columns as wide as their widest entry, two spaces apart."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(entry.ljust(width) for entry, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def counted(count: int, noun: str) -> str:
    """Format a number with its noun: "1 run", "2 runs"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, as one line."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0]
