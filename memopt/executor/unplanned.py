"""Where wrapped models run as they are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_HERE = threading.local()


def runs_unplanned() -> bool:
    """Whether wrapped models that this thread calls now run without a plan."""
    return getattr(_HERE, "running", False)


@contextlib.contextmanager
def unplanned() -> Iterator[None]:
    """Inside, wrapped models run without a plan: within a call of another one, for one."""
    before = runs_unplanned()
    _HERE.running = True
    try:
        yield
    finally:
        _HERE.running = before
