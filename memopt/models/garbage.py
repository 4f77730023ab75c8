"""Limits Python's garbage collector while many lasting objects are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from memopt.models.locks import ForkedLock

_NEVER = 1_000_000
_left: list[bool] = []
"""Holds something once a failed trace has left cycles, until they are collected."""
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


def cycles_left() -> None:
    """Tell that an error has left cycles of frames (`cycles_collected`)."""
    _left.append(True)


@contextlib.contextmanager
def cycles_collected() -> Iterator[None]:
    """Collect all garbage after the block if cycles of frames were left in it or before. Where it
    fails, its error holds them; whoever takes that can collect.

    Errors of a trace hold its frames, and those hold their callers': all that the user's functions
    have made when they return, a step's outputs and losses, would stay until Python collects.
    """
    yield
    if _left:
        _left.clear()
        gc.collect()
