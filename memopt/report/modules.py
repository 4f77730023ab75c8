"""Grouping operators by the user's modules: paths such as `encoder.layers.3.attn`, cut short."""

from __future__ import annotations

from collections.abc import Iterable

OUTSIDE = "(model)"
"""The group of operators outside any sub-module."""


def group_of(path: str, depth: int) -> str:
    """Return the first `depth` names of a module path."""
    return ".".join(path.split(".")[:depth]) if path else OUTSIDE


def depth_for(paths: Iterable[str], most: int) -> int:
    """Return the largest depth (at least 1) that gives at most `most` groups."""
    distinct = set(paths)
    deepest = max((path.count(".") + 1 for path in distinct), default=1)
    best = 1
    for depth in range(1, deepest + 1):
        if len({group_of(path, depth) for path in distinct}) <= most:
            best = depth
    return best
