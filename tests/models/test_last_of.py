"""Answers kept of the objects asked about last."""

from __future__ import annotations

import gc
import weakref

import pytest

from memopt.models.last_of import LastOf


class Thing:
    """Equal to every other thing."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing)

    __hash__ = None  # type: ignore[assignment]  # as of what is compared by its fields


def test_asks_once_about_the_very_same_object_and_question() -> None:
    last, one, other, asked = LastOf[int](2), Thing(), Thing(), list[object]()

    def answer(thing: Thing, question: object) -> int:
        return last.of((thing,), question, lambda: asked.append((id(thing), question)) or 7)

    for thing, question in ((one, 1), (one, 1), (other, 1), (one, 2), (one, 2), (other, 1)):
        assert answer(thing, question) == 7
    assert len(asked) == 3
    # Of more than two, the first is asked about again.
    answer(one, 1)
    assert len(asked) == 4


def test_keeps_nothing_alive_and_forgets_what_is_gone() -> None:
    last, thing = LastOf[Thing](), Thing()
    found = weakref.ref(last.of((thing,), None, Thing))
    assert found() is not None
    del thing
    gc.collect()
    assert found() is None


def test_what_fails_is_asked_again() -> None:
    last, thing = LastOf[int](), Thing()
    with pytest.raises(ZeroDivisionError):
        last.of((thing,), None, lambda: 1 // 0)
    assert last.of((thing,), None, lambda: 3) == 3
