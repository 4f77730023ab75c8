"""Calls back around forks: a fork copies all memory, but only the thread that forks.

In the child a lock that another thread held stays locked for ever, and a worker thread is gone
while its queue still accepts work. Data loaders fork, so objects that own locks or threads
register here; where atomic operations suffice, memopt uses no lock.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol


class Forked(Protocol):
    """An object that is called before a fork, and after it in the child."""

    def before_fork(self) -> None:
        """Let work in other threads end: the process is about to fork."""

    def in_child(self) -> None:
        """Make threads anew: this is the child."""


_TOLD: weakref.WeakSet[Any] = weakref.WeakSet()
_generation = 0


def tell_of_forks(thing: Forked) -> None:
    """Call `thing` at every fork for as long as it lives."""
    _TOLD.add(thing)


def generation() -> int:
    """Return the number of forks between this process and the one that imported memopt. Objects
    made in an earlier generation belong to another process."""
    return _generation


def _before() -> None:
    for thing in list(_TOLD):
        thing.before_fork()


def _in_child() -> None:
    global _generation
    _generation += 1
    for thing in list(_TOLD):
        thing.in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_child=_in_child)
