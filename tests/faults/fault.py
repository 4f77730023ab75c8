"""The table of faults: each is a row, with what is promised and a function that injects it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

MOST_PLACES = 600


class Part(StrEnum):
    """What a fault hits."""

    STEP = "a planned module's step"
    WHOLE = "a whole planned step, with its updates"
    PLANNING = "planning"
    WRAPPED = "`memopt.wrap` and `torch.compile`"
    SAVING = "saving and loading"
    CONTENT = "the content of plan files"
    KEPT = "what is kept on disk between processes"


@dataclass
class Room:
    """What a fault is given.

    Attributes:
        folder: empty, for files.
        patch: undone afterwards.
        everywhere: whether to fail at every place instead of a few.
    """

    folder: Path
    patch: pytest.MonkeyPatch
    everywhere: bool

    def places(self, count: int, few: int = 2) -> Iterable[int]:
        """Where to fail, of the places 1 to `count`: everywhere (of thousands, at `MOST_PLACES` of
        them), or at a few."""
        numbers = range(1, count + 1)
        most = MOST_PLACES if self.everywhere else few
        return numbers if count <= most else sorted(random.Random(count).sample(numbers, most))


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        part: what it hits.
        name: what happens; unique.
        promise: what holds afterwards.
        inject: makes it happen and checks the promise; how often it happened.
        slow: whether it takes longer than a fast test may, even at a few places.
    """

    part: Part
    name: str
    promise: str
    inject: Callable[[Room], int]
    slow: bool


FAULTS: list[Fault] = []


def fault(
    part: Part, name: str, promise: str, *, slow: bool = False
) -> Callable[[Callable[[Room], int]], Callable[[Room], int]]:
    """Enter a function into the table."""

    def enter(inject: Callable[[Room], int]) -> Callable[[Room], int]:
        FAULTS.append(Fault(part, name, promise, inject, slow))
        return inject

    return enter
