"""Python's garbage collector while much is made that stays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from memopt.models.locks import ForkedLock

_NEVER = 1_000_000
_lock = ForkedLock()
_inside: list[tuple[int, int, int]] = []
"""The thresholds that were found, once for each block that is under way."""


@contextlib.contextmanager
def full_collections_put_off() -> Iterator[None]:
    """Look through young objects only: a trace makes millions that stay until it is done, and to
    look through all of them again and again took a tenth of its time. Of the thresholds that the
    first of several threads found, the last one puts them back."""
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
