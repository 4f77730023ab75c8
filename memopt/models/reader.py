"""Writes JSON in memopt's canonical form, and reads JSON of unknown origin strictly."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, TypeVar

from memopt.errors import PlanFileError

T = TypeVar("T")


def canonical(document: object) -> bytes:
    """Write a parsed JSON document in canonical form: sorted, without spaces, in ASCII."""
    text = json.dumps(
        document,
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
        # NumPy's integers.
        default=index,
    )
    return text.encode("ascii")


def digest(document: object) -> str:
    """Return the SHA-256 (hex) of a parsed JSON document's canonical form."""
    return hashlib.sha256(canonical(document)).hexdigest()


def parse(data: bytes | str) -> object:
    """Parse JSON; refuse non-standard JSON and repeated fields.

    Raises:
        PlanFileError: what is wrong with the text.
    """

    def refuse(constant: str) -> object:
        raise PlanFileError(f"not a memopt file: {constant} is not JSON")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise PlanFileError(f"not a memopt file: the field {twice!r} is there twice")
        return fields

    try:
        parsed: object = json.loads(data, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"not a memopt file: {error}") from None
    return parsed


@dataclass(frozen=True, slots=True)
class Reader:
    """A parsed JSON value and its place in the file, for messages.

    Every method raises PlanFileError naming the place when the value is not of the wanted kind.
    """

    value: Any
    place: str

    def fail(self, wanted: str) -> PlanFileError:
        """Return the error to raise when the value is not `wanted`."""
        shown = repr(self.value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return PlanFileError(f"{self.place}: expected {wanted}, found {shown}")

    def text(self) -> str:
        """Return a string."""
        if not isinstance(self.value, str):
            raise self.fail("a string")
        return self.value

    def flag(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            raise self.fail("true or false")
        return self.value

    def whole(self) -> int:
        """Return a whole number."""
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.fail("a whole number")
        return self.value

    def number(self) -> float:
        """Return a finite number."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self.fail("a number")
        try:
            number = float(self.value)
        except OverflowError:
            raise self.fail("a finite number") from None
        if not math.isfinite(number):
            raise self.fail("a finite number")
        return number

    def number_text(self) -> float:
        """Return any float, NaN and infinities included, from a string as Python writes it."""
        text = self.text()
        try:
            value = float(text)
        except ValueError:
            raise self.fail("a number in a string") from None
        if repr(value) != text:
            raise self.fail("a number as Python writes it")
        return value

    def items(self) -> list[Reader]:
        """Return the elements of a list."""
        if not isinstance(self.value, list):
            raise self.fail("a list")
        return [Reader(item, f"{self.place}[{i}]") for i, item in enumerate(self.value)]

    def each(self, read: Callable[[Reader], T]) -> tuple[T, ...]:
        """Return a list whose elements were read by `read`."""
        return tuple(read(item) for item in self.items())

    def pairs(self) -> list[tuple[str, Reader]]:
        """Return a list of (name, value) from a list of [name, value]."""
        rows = [(row, row.items()) for row in self.items()]
        for row, items in rows:
            if len(items) != 2:
                raise row.fail("[name, value]")
        return [(items[0].text(), items[1]) for _, items in rows]

    def entries(self) -> dict[str, Reader]:
        """Return the fields of an object, whatever their names."""
        if not isinstance(self.value, Mapping):
            raise self.fail("an object")
        return {name: Reader(item, f"{self.place}.{name}") for name, item in self.value.items()}

    def only_entry(self, wanted: str) -> tuple[str, Reader]:
        """Return the field of an object that has exactly one."""
        entries = list(self.entries().items())
        if len(entries) != 1:
            raise self.fail(wanted)
        return entries[0]

    def fields(self, *names: str, optional: tuple[str, ...] = ()) -> dict[str, Reader]:
        """Return the fields of an object: all of `names`, and perhaps those in `optional`."""
        entries = self.entries()
        for name in names:
            if name not in entries:
                raise PlanFileError(f"{self.place}: the field {name!r} is missing")
        for name in entries:
            if name not in names and name not in optional:
                raise PlanFileError(f"{self.place}: there is no field {name!r}")
        return entries
