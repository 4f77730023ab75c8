"""Strict reading of parsed JSON: every field present, of its type, and no other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from memopt.errors import PlanFileError

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

INFINITY = "inf"
"""How an infinite rate is written: JSON has no number for it."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A parsed JSON value and where it stands in the file, for messages.

    Every method raises PlanFileError naming the place when the value is not what it asks for.
    """

    value: Any
    place: str

    def fail(self, wanted: str) -> PlanFileError:
        """The error to raise when the value is not `wanted`."""
        shown = repr(self.value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return PlanFileError(f"{self.place}: expected {wanted}, found {shown}")

    def text(self) -> str:
        """A string."""
        if not isinstance(self.value, str):
            raise self.fail("a string")
        return self.value

    def flag(self) -> bool:
        """true or false."""
        if not isinstance(self.value, bool):
            raise self.fail("true or false")
        return self.value

    def whole(self) -> int:
        """A whole number."""
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.fail("a whole number")
        return self.value

    def number(self) -> float:
        """A finite number."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self.fail("a number")
        try:
            number = float(self.value)
        except OverflowError:
            raise self.fail("a finite number") from None
        if not math.isfinite(number):
            raise self.fail("a finite number")
        return number

    def rate(self) -> float:
        """A finite number, or "inf"."""
        return math.inf if self.value == INFINITY else self.number()

    def choice(self, kinds: type[E]) -> E:
        """A member of an enumeration, by value."""
        try:
            return kinds(self.text())
        except ValueError:
            names = ", ".join(repr(kind.value) for kind in kinds)
            raise self.fail(f"one of {names}") from None

    def optional(self, read: Callable[[Reader], T]) -> T | None:
        """null, or what `read` takes."""
        return None if self.value is None else read(self)

    def items(self) -> list[Reader]:
        """The elements of a list."""
        if not isinstance(self.value, list):
            raise self.fail("a list")
        return [Reader(item, f"{self.place}[{i}]") for i, item in enumerate(self.value)]

    def each(self, read: Callable[[Reader], T]) -> tuple[T, ...]:
        """A list, every element of which `read` takes."""
        return tuple(read(item) for item in self.items())

    def wholes(self) -> tuple[int, ...]:
        """A list of whole numbers."""
        return self.each(Reader.whole)

    def entries(self) -> dict[str, Reader]:
        """The fields of an object, whatever their names."""
        if not isinstance(self.value, Mapping):
            raise self.fail("an object")
        return {name: Reader(item, f"{self.place}.{name}") for name, item in self.value.items()}

    def fields(self, *names: str, optional: tuple[str, ...] = ()) -> list[Reader]:
        """The fields of an object that has exactly these, in this order; those that may be missing
        come last, null where they are."""
        entries = self.entries()
        for name in names:
            if name not in entries:
                raise PlanFileError(f"{self.place}: the field {name!r} is missing")
        for name in entries:
            if name not in (*names, *optional):
                raise PlanFileError(f"{self.place}: there is no field {name!r}")
        absent = {name: Reader(None, f"{self.place}.{name}") for name in optional}
        return [(absent | entries)[name] for name in (*names, *optional)]

    def build(self, make: Callable[[], T]) -> T:
        """Call a constructor; its ValueError becomes a PlanFileError naming the place."""
        try:
            return make()
        except ValueError as error:
            raise PlanFileError(f"{self.place}: {error}") from error
