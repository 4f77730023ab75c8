"""What a forked child needs anew: a fork copies all memory, but only the thread that forks.

In the child a lock that another thread held stays locked for ever, and a worker thread is gone
while its queue goes on taking work. Data loaders fork, so objects that own such things register;
and where atomic operations do, there is no lock.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol


class Forked(Protocol):
    """What is told about forks."""

    def before_fork(self) -> None:
        """The process is about to fork: nothing may be under way in other threads."""

    def in_child(self) -> None:
        """This is the child: make threads anew."""


_TOLD: weakref.WeakSet[Any] = weakref.WeakSet()
_generation = 0


def tell_of_forks(thing: Forked) -> None:
    """Tell `thing` of every fork for as long as it lives."""
    _TOLD.add(thing)


def generation() -> int:
    """How many forks lie between this process and the one that imported memopt. What was made in
    an earlier generation belongs to another process."""
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
