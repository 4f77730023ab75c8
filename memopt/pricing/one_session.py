"""Lets one thread at a time have a profile of memopt's: torch has one session for all threads, and
crashes where a second one begins another."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from memopt.errors import ProfilerBusyError
from memopt.models.locks import ForkedLock

WAIT_S = 10.0
_HOLDER: list[int] = []
"""The thread that has a profile; empty: none has."""
_TAKING = ForkedLock()


def taken_elsewhere() -> bool:
    """Return whether another thread, which lives, has a profile."""
    holder = next(iter(_HOLDER), None)
    if holder is None or holder == threading.get_ident():
        return False
    return any(one.ident == holder for one in threading.enumerate())


def free_soon() -> bool:
    """Wait until no other thread has a profile, ten seconds at most; return whether that is so."""
    until_s = time.monotonic() + WAIT_S
    while taken_elsewhere():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.002)
    return True


@contextmanager
def session() -> Iterator[None]:
    """Have torch's profiler for this thread.

    Raises:
        ProfilerBusyError: another thread has it.
    """
    thread = threading.get_ident()
    while not _take(thread):
        if not free_soon():
            raise ProfilerBusyError
    try:
        yield
    finally:
        if [thread] == _HOLDER:
            _HOLDER.clear()


def _take(thread: int) -> bool:
    with _TAKING:
        free = not taken_elsewhere()
        if free:
            _HOLDER[:] = [thread]
        return free
