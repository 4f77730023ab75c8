"""Limits Python's garbage collector while many lasting objects are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from memopt.models.locks import ForkedLock

_NEVER = 1_000_000
_lock = ForkedLock()
_inside: list[tuple[int, int, int]] = []
"""The original thresholds, once for each block under way."""


@contextlib.contextmanager
def full_collections_deferred() -> Iterator[None]:
    """Collect only young objects in the block.

    A trace makes millions of objects that live until it is done; examining all of them again and
    again took a tenth of its time. If several threads are inside, the last to leave restores the
    thresholds that the first had found.
    """
    with _lock:
        found = _inside[0] if _inside else gc.get_threshold()
        _inside.append(found)
        gc.set_threshold(found[0], found[1], _NEVER)
    try:
        yield
    finally:
        with _lock:
            _inside.pop()
            if not _inside:
                gc.set_threshold(*found)
