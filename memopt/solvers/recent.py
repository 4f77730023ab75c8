"""A small cache of recent answers, so that a repeated question costs nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from memopt.models.locks import ForkedLock

T = TypeVar("T")


class RecentAnswers(Generic[T]):
    """The last few answers by question. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = ForkedLock()

    def get(self, key: Hashable, compute: Callable[[], T], complete: Callable[[T], bool]) -> T:
        """Return the answer to `key`, computed if absent; an incomplete answer is not kept."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        answer = compute()
        if complete(answer):
            with self._lock:
                self._entries[key] = answer
                while len(self._entries) > self._capacity:
                    self._entries.popitem(last=False)
        return answer
