"""Switches planning of wrapped models off for a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_HERE = threading.local()


def runs_unplanned() -> bool:
    """Return whether wrapped models that this thread calls now run without a plan."""
    return getattr(_HERE, "running", False)


@contextlib.contextmanager
def unplanned() -> Iterator[None]:
    """Run wrapped models without a plan in the block, as within a planned call of another."""
    before = runs_unplanned()
    _HERE.running = True
    try:
        yield
    finally:
        _HERE.running = before
