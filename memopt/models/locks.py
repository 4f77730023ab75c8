"""Locks and threads where a process forks, as data loaders do.

A fork copies all memory, but only the thread that forks: in the child a lock that another thread
held would stay locked for ever, and a worker thread is gone while its queue still accepts work. So
objects that own locks or threads are told; where atomic operations suffice, memopt uses no lock.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import Any


class Forked:
    """An object that is told of every fork for as long as it lives."""

    def __init__(self) -> None:
        _TOLD.add(self)

    def before_fork(self) -> None:
        """Let work in other threads end: the process is about to fork."""

    def in_child(self) -> None:
        """Make locks and threads anew: this is the child."""


class ForkedLock(Forked):
    """A reentrant lock, free in the child of a fork."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self.in_child()
        super().__init__()

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

    def in_child(self) -> None:
        """Replace the lock: in the child nobody holds it."""
        self._lock = threading.RLock()


_TOLD: weakref.WeakSet[Forked] = weakref.WeakSet()
_generation = 0


def generation() -> int:
    """Return the number of forks between this process and the one that imported memopt. Objects
    made in an earlier generation belong to another process."""
    return _generation


def _before() -> None:
    for one in list(_TOLD):
        one.before_fork()


def _in_child() -> None:
    global _generation
    _generation += 1
    for one in list(_TOLD):
        one.in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_child=_in_child)
