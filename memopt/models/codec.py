"""Writes dataclasses as JSON by the annotations of their fields, and reads them strictly.

Enumerations are written as their values, tuples as lists, dataclasses as objects of their fields,
-0.0 as 0.0, which it equals; an `object` is written unchanged. `Annotated` refines a type: a
`Columns` writes a fixed tuple or a dataclass as a list, `TaggedRows` write a union of dataclasses
as lists that begin with a word, a `Check` refuses wrong values when reading, and a `Codec` writes
and reads in its own way. (Annotations are evaluated inside their class: a lambda in one cannot name
another object of its module, so define it outside of the class.) An object has every field and no
other, except as the field's metadata say: `SPARSE`, `FLAT`, `{NAME: ...}`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Generic, TypeAlias, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of

from memopt.errors import PlanFileError
from memopt.models.reader import Reader

T = TypeVar("T")

NAME = "name in JSON"
"""Key of a field's metadata: its name in JSON, if that is not the attribute's."""
SPARSE: Mapping[str, bool] = {"left out": True}
"""Metadata of a field that is left out if it has its default."""
FLAT: Mapping[str, bool] = {"flat": True}
"""Metadata of a field, a dataclass, whose own fields are written beside the others."""

_INFINITY = "inf"


@dataclass(frozen=True)
class Codec(Generic[T]):
    """A pair of functions that write and read the values of one type."""

    encode: Callable[[T], Any]
    read: Callable[[Reader], T]


@dataclass(frozen=True, slots=True)
class Check:
    """A condition on a value that was read; messages say `wanted` if it does not hold."""

    wanted: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True, init=False)
class Columns:
    """The names of the elements of a list of fixed length."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def __str__(self) -> str:
        return f"[{', '.join(self.names)}]"


@dataclass(frozen=True, eq=False)
class TaggedRows:
    """The dataclasses of one union, by the words that their rows begin with."""

    wanted: str
    kinds: Mapping[str, type]


Rate: TypeAlias = Annotated[
    float,
    Codec(
        lambda value: _INFINITY if math.isinf(value) else float(value) + 0.0,
        lambda reader: math.inf if reader.value == _INFINITY else reader.number(),
    ),
]
Natural: TypeAlias = Annotated[int, Check("a whole number, at least 0", lambda value: value >= 0)]
Bytes: TypeAlias = Annotated[int, Check("bytes, at least 0", lambda value: value >= 0)]
Seconds: TypeAlias = Annotated[float, Check("seconds, at least 0", lambda value: value >= 0)]
Line: TypeAlias = Annotated[str, Check("one line of text", str.isprintable)]


def encode(value: Any, kind: Any = None) -> Any:
    """Encode a value for `json`; `kind` is its annotation, if not its class."""
    hint: Any = type(value) if kind is None else kind
    return codec(hint).encode(value)


def read(kind: type[T], reader: Reader) -> T:
    """Read a value that `encode` wrote.

    Raises:
        PlanFileError: a field is missing, unknown or wrong; the message names the place.
    """
    hint: Any = kind
    found: T = codec(hint).read(reader)
    return found


_PLAIN: dict[Any, Codec[Any]] = {
    bool: Codec(lambda value: value, Reader.flag),
    int: Codec(int, Reader.whole),
    float: Codec(lambda value: float(value) + 0.0, Reader.number),
    str: Codec(lambda value: value, Reader.text),
    object: Codec(lambda value: value, lambda reader: reader.value),
}


@functools.cache
def codec(kind: Any) -> Codec[Any]:
    """Return the codec of an annotation."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _annotated(*arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _list(codec(arguments[0]))
    if origin is dict and arguments[0] is str:
        return _mapping(codec(arguments[1]))
    if origin in (Union, types.UnionType) and len(arguments) == 2 and arguments[1] is type(None):
        return _optional(codec(arguments[0]))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _choice(kind)
    if dataclasses.is_dataclass(kind):
        found = _Object(kind)
        return Codec(found.encode, found.read)
    raise TypeError(f"there is no codec for {kind}")


def _annotated(kind: Any, *notes: object) -> Codec[Any]:
    *inner, note = notes
    if isinstance(note, Codec):
        return note
    if isinstance(note, TaggedRows):
        return _tagged(note)
    if isinstance(note, Columns):
        return _row(note, kind)
    assert isinstance(note, Check)
    return _checked(_annotated(kind, *inner) if inner else codec(kind), note)


def _checked(inner: Codec[Any], check: Check) -> Codec[Any]:
    def checked(reader: Reader) -> Any:
        value = inner.read(reader)
        if not check.holds(value):
            raise reader.fail(check.wanted)
        return value

    return Codec(inner.encode, checked)


def _list(inner: Codec[Any]) -> Codec[Any]:
    def items(reader: Reader) -> tuple[Any, ...]:
        found = reader.value
        if inner is _PLAIN[int] and isinstance(found, list) and {*map(type, found)} <= {int}:
            # Most of a graph, so without a Reader for each element.
            return tuple(found)
        return reader.each(inner.read)

    return Codec(lambda values: [*map(inner.encode, values)], items)


def _row(row: Columns, kind: Any) -> Codec[Any]:
    if dataclasses.is_dataclass(kind):
        found = _DataclassRow(kind, row.names)
        return Codec(found.encode, lambda reader: found.read(reader, reader.items(), str(row)))
    inner = [codec(argument) for argument in get_args(kind)]

    def elements(reader: Reader) -> tuple[Any, ...]:
        items = reader.items()
        if len(items) != len(inner):
            raise reader.fail(str(row))
        return tuple(one.read(item) for one, item in zip(inner, items, strict=True))

    return Codec(
        lambda values: [one.encode(value) for one, value in zip(inner, values, strict=True)],
        elements,
    )


def _mapping(inner: Codec[Any]) -> Codec[Any]:
    return Codec(
        lambda values: {name: inner.encode(value) for name, value in values.items()},
        lambda reader: {name: inner.read(item) for name, item in reader.entries().items()},
    )


def _optional(inner: Codec[Any]) -> Codec[Any]:
    return Codec(
        lambda value: None if value is None else inner.encode(value),
        lambda reader: None if reader.value is None else inner.read(reader),
    )


def _choice(kind: type[StrEnum]) -> Codec[Any]:
    names = ", ".join(repr(member.value) for member in kind)

    def choice(reader: Reader) -> StrEnum:
        try:
            return kind(reader.text())
        except ValueError:
            raise reader.fail(f"one of {names}") from None

    return Codec(lambda value: value.value, choice)


def _tagged(rows: TaggedRows) -> Codec[Any]:
    tags = {kind: tag for tag, kind in rows.kinds.items()}
    by_tag = {tag: _DataclassRow(kind) for tag, kind in rows.kinds.items()}

    def tagged(reader: Reader) -> Any:
        tag, *items = reader.items() or [reader]
        if not isinstance(tag.value, str) or tag.value not in by_tag:
            raise reader.fail(rows.wanted)
        return by_tag[tag.value].read(reader, items, rows.wanted)

    def encoded(value: Any) -> list[Any]:
        tag = tags[type(value)]
        return [tag, *by_tag[tag].encode(value)]

    return Codec(encoded, tagged)


class _Field:
    """A field of a dataclass: its attribute, its name in JSON and its codec."""

    def __init__(self, field: dataclasses.Field[Any], hint: Any) -> None:
        self.attribute = field.name
        self.name: str = field.metadata.get(NAME, field.name)
        self.default = field.default
        self.left_out = SPARSE.items() <= field.metadata.items()
        self.flat = _Object(hint) if FLAT.items() <= field.metadata.items() else None
        self.codec = codec(hint)


def _fields_of(kind: Any) -> list[_Field]:
    hints = hints_of(kind, include_extras=True)
    return [_Field(field, hints[field.name]) for field in dataclasses.fields(kind) if field.init]


def _build(reader: Reader, kind: Any, values: dict[str, Any]) -> Any:
    """Call a constructor; its ValueError becomes a PlanFileError naming the place."""
    try:
        return kind(**values)
    except ValueError as error:
        raise PlanFileError(f"{reader.place}: {error}") from error


class _DataclassRow:
    """Encodes a dataclass as a list of its fields; those at the end may be SPARSE."""

    def __init__(self, kind: Any, names: Iterable[str] = ()) -> None:
        found = {field.attribute: field for field in _fields_of(kind)}
        self._kind, self._fields = kind, [found[name] for name in names or found]
        self._least = sum(not field.left_out for field in self._fields)

    def encode(self, value: Any) -> list[Any]:
        row = []
        for field in self._fields:
            item = getattr(value, field.attribute)
            if field.left_out and item == field.default:
                break
            row.append(field.codec.encode(item))
        return row

    def read(self, reader: Reader, items: list[Reader], wanted: str) -> Any:
        if not self._least <= len(items) <= len(self._fields):
            raise reader.fail(wanted)
        values = {}
        for field, item in zip(self._fields, items, strict=False):
            value = values[field.attribute] = field.codec.read(item)
            if field.left_out and value == field.default:
                raise reader.fail(wanted)
        return _build(reader, self._kind, values)


class _Object:
    """Encodes a dataclass as an object of its fields."""

    def __init__(self, kind: Any) -> None:
        self._kind, self._fields = kind, _fields_of(kind)
        names = self.names()
        self._needed = tuple(name for name, left_out in names if not left_out)
        self._optional = tuple(name for name, left_out in names if left_out)

    def names(self) -> list[tuple[str, bool]]:
        """Return the names in JSON, FLAT fields' too, and whether they are SPARSE."""
        found = []
        for field in self._fields:
            found += field.flat.names() if field.flat else [(field.name, field.left_out)]
        return found

    def encode(self, value: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for field in self._fields:
            item = getattr(value, field.attribute)
            if field.flat:
                found.update(field.flat.encode(item))
            elif not (field.left_out and item == field.default):
                found[field.name] = field.codec.encode(item)
        return found

    def read(self, reader: Reader) -> Any:
        return self._made(reader, reader.fields(*self._needed, optional=self._optional))

    def _made(self, reader: Reader, entries: dict[str, Reader]) -> Any:
        values = {}
        for field in self._fields:
            if field.flat:
                values[field.attribute] = field.flat._made(reader, entries)
                continue
            if field.name in entries:
                values[field.attribute] = field.codec.read(entries[field.name])
        return _build(reader, self._kind, values)
