"""The arguments of a call as plain data, and their form in plan files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from memopt.errors import PlanFileError
from memopt.models.codec import Check, Codec, Columns, Line, codec
from memopt.models.reader import Reader

DEEPEST_ARGUMENT = 32
"""Most levels of tuples, lists and dicts among the arguments of a call."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor argument, parameter or buffer, without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Line
    device: Line
    requires_grad: bool

    def __str__(self) -> str:
        grad = ", requires_grad" if self.requires_grad else ""
        return f"{self.dtype}{list(self.shape)} with strides {self.strides} on {self.device}{grad}"


@dataclass(frozen=True, slots=True)
class Plain:
    """An argument that is None, a bool, an int, a float or a str."""

    value: bool | int | float | str | None

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class Nest:
    """A tuple, list or dict of arguments, or an object of a class that `kind` names; `keys` are a
    dict's keys or an object's attributes, in its order."""

    kind: str
    items: tuple[Argument, ...]
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"a {self.kind} of {len(self.items)}"


@dataclass(frozen=True, slots=True)
class Opaque:
    """An argument that a file cannot hold."""

    type_name: str

    def __str__(self) -> str:
        return f"a {self.type_name}"


Argument: TypeAlias = TensorSpec | Plain | Nest | Opaque


Spec: TypeAlias = Annotated[
    TensorSpec,
    Columns("dtype", "shape", "strides", "device", "requires_grad"),
    Check(
        "a shape and as many strides, at least 0",
        lambda spec: (
            len(spec.shape) == len(spec.strides)
            and all(extent >= 0 for extent in (*spec.shape, *spec.strides))
        ),
    ),
]
"""A TensorSpec in a file."""


def _encode(value: Argument, place: str = "inputs") -> dict[str, Any]:
    """Encode an argument as an object with one field, named after its kind.

    Raises:
        PlanFileError: a file cannot hold it.
    """
    if isinstance(value, TensorSpec):
        return {"tensor": codec(Spec).encode(value)}
    if isinstance(value, Plain):
        if isinstance(value.value, float):
            return {"float": repr(value.value)}
        return {"value": value.value}
    if isinstance(value, Nest):
        names = value.keys or range(len(value.items))
        items = [
            _encode(item, f"{place}[{name!r}]")
            for name, item in zip(names, value.items, strict=True)
        ]
        if value.kind in ("tuple", "list"):
            return {value.kind: items}
        pairs = [list(pair) for pair in zip(value.keys, items, strict=True)]
        return {"dict": pairs} if value.kind == "dict" else {"object": [value.kind, pairs]}
    raise PlanFileError(
        f"{place} is {value}: a plan file holds tensors, None, bool, int, float and str in "
        "tuples, lists, dicts with str keys and objects; pass such inputs when planning, or use "
        "the plan in this process without saving it"
    )


def _read(reader: Reader, depth: int = 0) -> Argument:
    """Read an argument that `_encode` wrote."""
    wanted = f"one argument, at most {DEEPEST_ARGUMENT} levels deep"
    kind, body = reader.only_entry(wanted)
    if depth > DEEPEST_ARGUMENT:
        raise reader.fail(wanted)
    if kind == "tensor":
        spec: TensorSpec = codec(Spec).read(body)
        return spec
    if kind == "float":
        return Plain(body.number_text())
    if kind == "value":
        if body.value is not None and not isinstance(body.value, bool | int | str):
            raise body.fail("null, true, false, a whole number or a string")
        return Plain(body.value)
    if kind in ("tuple", "list"):
        return Nest(kind, body.each(lambda item: _read(item, depth + 1)))
    if kind in ("dict", "object"):
        named = kind
        if kind == "object":
            parts = body.items()
            if len(parts) != 2:
                raise body.fail("a class and its attributes")
            named, body = parts[0].text(), parts[1]
        pairs = [(name, _read(item, depth + 1)) for name, item in body.pairs()]
        keys = tuple(name for name, _ in pairs)
        if len(set(keys)) != len(keys):
            raise body.fail("keys that differ")
        return Nest(named, tuple(value for _, value in pairs), keys)
    raise reader.fail("an argument")


def _nest(kind: str) -> Codec[Nest]:
    def read_nest(reader: Reader) -> Nest:
        value = _read(reader)
        if not isinstance(value, Nest) or value.kind != kind:
            raise reader.fail(f"a {kind}")
        return value

    return Codec(_encode, read_nest)


Arguments: TypeAlias = Annotated[Nest, _nest("tuple")]
"""The positional arguments of a call."""
KeywordArguments: TypeAlias = Annotated[Nest, _nest("dict")]
"""The keyword arguments of a call."""
