"""Warns at the user's line, however deep in memopt and torch the cause is."""

from __future__ import annotations

import sys
import types
import warnings

_OWN = ("memopt", "torch", "contextlib", "weakref", "")
"""Modules whose lines are not the user's (weakref ends a backward); generated code has no name."""


def warn(text: str) -> None:
    """Warn at the innermost line outside of memopt and torch: the loop's call or backward."""
    frame: types.FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OWN:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
