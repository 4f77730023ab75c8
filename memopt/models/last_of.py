"""Keeps what was found of the objects asked about last: planning asks the same in several rooms."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
KEPT = 4


class LastOf(Generic[T]):
    """The answers about the last few objects, which must not change; an answer goes with them."""

    def __init__(self, kept: int = KEPT) -> None:
        self._known: deque[tuple[tuple[weakref.ref[Any], ...], object, T]] = deque(maxlen=kept)

    def of(self, objects: tuple[Any, ...], question: object, find: Callable[[], T]) -> T:
        """Return the answer to a question about these very objects; find it if it is not kept."""
        for known, asked, answer in tuple(self._known):
            same = all(one() is other for one, other in zip(known, objects, strict=True))
            if same and asked == question:
                return answer
        answer = find()
        self._known.append(
            (tuple(weakref.ref(one, self._forget) for one in objects), question, answer)
        )
        return answer

    def _forget(self, _: weakref.ref[Any]) -> None:
        """Drop the answers about what is gone."""
        kept = [one for one in tuple(self._known) if all(known() is not None for known in one[0])]
        self._known.clear()
        self._known.extend(kept)
