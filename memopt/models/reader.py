"""JSON as memopt writes it, and strict reading of what somebody else may have written."""

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
    """A parsed JSON document as memopt always writes it: sorted, without spaces, in ASCII."""
    text = json.dumps(
        document,
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
        # Whole numbers of numpy.
        default=index,
    )
    return text.encode("ascii")


def digest(document: object) -> str:
    """Names a parsed JSON document: the SHA-256 (hex) of its canonical form."""
    return hashlib.sha256(canonical(document)).hexdigest()


def parse(data: bytes | str) -> object:
    """Parse JSON, refusing what is not standard JSON and repeated fields.

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

    def number_text(self) -> float:
        """Any float, NaN and the infinite ones too, as Python writes it in a string."""
        text = self.text()
        try:
            value = float(text)
        except ValueError:
            raise self.fail("a number in a string") from None
        if repr(value) != text:
            raise self.fail("a number as Python writes it")
        return value

    def items(self) -> list[Reader]:
        """The elements of a list."""
        if not isinstance(self.value, list):
            raise self.fail("a list")
        return [Reader(item, f"{self.place}[{i}]") for i, item in enumerate(self.value)]

    def each(self, read: Callable[[Reader], T]) -> tuple[T, ...]:
        """A list, every element of which `read` takes."""
        return tuple(read(item) for item in self.items())

    def pairs(self) -> list[tuple[str, Reader]]:
        """A list of [name, value]."""
        rows = [(row, row.items()) for row in self.items()]
        for row, items in rows:
            if len(items) != 2:
                raise row.fail("[name, value]")
        return [(items[0].text(), items[1]) for _, items in rows]

    def entries(self) -> dict[str, Reader]:
        """The fields of an object, whatever their names."""
        if not isinstance(self.value, Mapping):
            raise self.fail("an object")
        return {name: Reader(item, f"{self.place}.{name}") for name, item in self.value.items()}

    def only_entry(self, wanted: str) -> tuple[str, Reader]:
        """The field of an object that has exactly one."""
        entries = list(self.entries().items())
        if len(entries) != 1:
            raise self.fail(wanted)
        return entries[0]

    def fields(self, *names: str, optional: tuple[str, ...] = ()) -> dict[str, Reader]:
        """The fields of an object that has all of `names`, and perhaps those in `optional`."""
        entries = self.entries()
        for name in names:
            if name not in entries:
                raise PlanFileError(f"{self.place}: the field {name!r} is missing")
        for name in entries:
            if name not in names and name not in optional:
                raise PlanFileError(f"{self.place}: there is no field {name!r}")
        return entries
