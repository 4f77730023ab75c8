"""Sets that are joined two by two."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class DisjointSets(Generic[T]):
    """Things, each in a set of its own until that is joined with another's."""

    def __init__(self) -> None:
        self._above: dict[T, T] = {}

    def root(self, one: T) -> T:
        """Return the thing that stands for the set of this one."""
        above = self._above
        while (other := above.setdefault(one, one)) != one:
            above[one] = above[other]
            one = above[one]
        return one

    def join(self, one: T, other: T) -> bool:
        """Join the sets of two things; return whether they were two. The first one's root stands
        for both."""
        kept, gone = self.root(one), self.root(other)
        self._above[gone] = kept
        return kept != gone

    def sets(self, things: Iterable[T]) -> list[list[T]]:
        """Return the sets that these things are in, each in their order, the first one's first."""
        found: dict[T, list[T]] = {}
        for one in things:
            found.setdefault(self.root(one), []).append(one)
        return list(found.values())
