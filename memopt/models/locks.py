"""Locks that a forked process can take.

A fork copies all memory, but only the thread that forks: in the child a lock that another thread
held would stay locked for ever. Data loaders fork.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import Any


class ForkedLock:
    """A reentrant lock, free in the child of a fork."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held: list[Any] = []
        _LOCKS.add(self)

    def __enter__(self) -> None:
        lock = self._lock
        lock.acquire()
        self._held.append(lock)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held.pop().release()

    def renew(self) -> None:
        """Replace the lock in a forked child, where nobody holds it."""
        self._lock = threading.RLock()


_LOCKS: weakref.WeakSet[ForkedLock] = weakref.WeakSet()


def _renew() -> None:
    for lock in list(_LOCKS):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
