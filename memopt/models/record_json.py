"""How a ModelRecord stands in JSON, field by field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from memopt.errors import PlanFileError
from memopt.models.codec import Reader
from memopt.models.record import Argument, ModelRecord, Nest, OutputGradients, Plain, TensorSpec

T = TypeVar("T")

DEEPEST_ARGUMENT = 32
"""Levels of tuples, lists and dicts among the arguments of a call."""

AUTOCAST_DEVICES = ("cpu", "cuda")
_HALVES = ("bfloat16", "float16")


def encode_record(value: ModelRecord) -> dict[str, Any]:
    """A ModelRecord as what `json` writes.

    Raises:
        PlanFileError: the example call has an argument that a file cannot hold.
    """
    return {
        "model": value.model,
        "device": value.device,
        "args": _encode_argument("inputs", value.args),
        "kwargs": _encode_argument("inputs", value.kwargs),
        "training": [[name, flag] for name, flag in value.training],
        "tensors": [[name, _encode_spec(spec)] for name, spec in value.tensors],
        "autocast": list(value.autocast),
        "torch_version": value.torch_version,
        "block_bytes": value.block_bytes,
        "fingerprint": value.fingerprint,
        "unused_outputs": list(value.output_gradients.unused),
        "gradient_strides": [
            [position, list(strides)] for position, strides in value.output_gradients.strides
        ],
        "held_gradient_bytes": value.output_gradients.held_bytes,
        "loss_bytes": value.loss_bytes,
        "repeated": [list(pair) for pair in value.repeated],
        **({"library_bytes": value.library_bytes} if value.library_bytes else {}),
        **({"resized": [list(pair) for pair in value.resized]} if value.resized else {}),
    }


def _encode_spec(spec: TensorSpec) -> list[Any]:
    shape, strides = list(spec.shape), list(spec.strides)
    return [spec.dtype, shape, strides, spec.device, spec.requires_grad]


def _encode_argument(place: str, value: Argument) -> dict[str, Any]:
    if isinstance(value, TensorSpec):
        return {"tensor": _encode_spec(value)}
    if isinstance(value, Plain):
        if isinstance(value.value, float):
            return {"float": repr(value.value)}
        return {"value": value.value}
    if isinstance(value, Nest):
        names = value.keys or range(len(value.items))
        items = [
            _encode_argument(f"{place}[{name!r}]", item)
            for name, item in zip(names, value.items, strict=True)
        ]
        if value.kind == "dict":
            return {"dict": [list(pair) for pair in zip(value.keys, items, strict=True)]}
        return {value.kind: items}
    raise PlanFileError(
        f"{place} is {value}: a plan file holds tensors, None, bool, int, float and str in "
        "tuples, lists and dicts with str keys; pass such inputs when planning, or use the plan "
        "in this process without saving it"
    )


def read_record(reader: Reader) -> ModelRecord:
    """The ModelRecord that `encode_record` wrote."""
    names = (
        "model",
        "device",
        "args",
        "kwargs",
        "training",
        "tensors",
        "autocast",
        "torch_version",
        "block_bytes",
        "fingerprint",
    )
    later = (
        "unused_outputs",
        "gradient_strides",
        "held_gradient_bytes",
        "loss_bytes",
        "repeated",
        "resized",
        "library_bytes",
    )
    found = dict(zip((*names, *later), reader.fields(*names, optional=later), strict=True))
    return ModelRecord(
        model=_read_line(found["model"]),
        device=found["device"].text(),
        args=_read_nest(found["args"], "tuple"),
        kwargs=_read_nest(found["kwargs"], "dict"),
        training=found["training"].each(lambda row: _pair(row, Reader.flag)),
        tensors=found["tensors"].each(lambda row: _pair(row, _read_spec)),
        autocast=_read_autocast(found["autocast"]),
        torch_version=_read_line(found["torch_version"]),
        block_bytes=_at_least(found["block_bytes"], 1),
        fingerprint=found["fingerprint"].text(),
        output_gradients=OutputGradients(
            unused=found["unused_outputs"].optional(_read_positions) or (),
            strides=found["gradient_strides"].optional(lambda rows: rows.each(_read_strides)) or (),
            held_bytes=found["held_gradient_bytes"].optional(Reader.whole) or 0,
        ),
        loss_bytes=found["loss_bytes"].optional(lambda item: _at_least(item, 0)) or 0,
        repeated=found["repeated"].optional(lambda rows: rows.each(_read_repeated)) or (),
        resized=found["resized"].optional(lambda rows: rows.each(_read_resized)) or (),
        library_bytes=found["library_bytes"].optional(lambda item: _at_least(item, 0)) or 0,
    )


def _read_line(reader: Reader) -> str:
    text = reader.text()
    if not text.isprintable():
        raise reader.fail("one line of text")
    return text


def _at_least(reader: Reader, least: int) -> int:
    value = reader.whole()
    if value < least:
        raise reader.fail(f"a whole number, at least {least}")
    return value


def _read_positions(reader: Reader) -> tuple[int, ...]:
    return reader.each(lambda item: _at_least(item, 0))


def _read_autocast(reader: Reader) -> tuple[str | None, ...]:
    row = reader.each(lambda item: item.optional(Reader.text))
    if len(row) != len(AUTOCAST_DEVICES) or any(x is not None and x not in _HALVES for x in row):
        names = " or ".join(map(repr, _HALVES))
        raise reader.fail(f"null, {names} for each of {', '.join(AUTOCAST_DEVICES)}")
    return row


def _read_resized(reader: Reader) -> tuple[int, int]:
    row = _read_positions(reader)
    if len(row) != 2:
        raise reader.fail("[tensor, bytes]")
    return row[0], row[1]


def _pair(reader: Reader, read: Callable[[Reader], T]) -> tuple[str, T]:
    row = reader.items()
    if len(row) != 2:
        raise reader.fail("[name, value]")
    return row[0].text(), read(row[1])


def _read_strides(reader: Reader) -> tuple[int, tuple[int, ...]]:
    row = reader.items()
    if len(row) != 2:
        raise reader.fail("[position, strides]")
    return row[0].whole(), row[1].wholes()


def _read_repeated(reader: Reader) -> tuple[int, int]:
    row = reader.wholes()
    if len(row) != 2 or not 0 <= row[1] < row[0]:
        raise reader.fail("the positions of an argument and of an earlier one")
    return row[0], row[1]


def _read_spec(reader: Reader) -> TensorSpec:
    row = reader.items()
    if len(row) != 5:
        raise reader.fail("[dtype, shape, strides, device, requires_grad]")
    shape, strides = row[1].wholes(), row[2].wholes()
    if len(shape) != len(strides) or any(x < 0 for x in (*shape, *strides)):
        raise reader.fail("a shape and as many strides, at least 0")
    return TensorSpec(shape, strides, _read_line(row[0]), _read_line(row[3]), row[4].flag())


def _read_nest(reader: Reader, kind: str) -> Nest:
    value = _read_argument(reader, 0)
    if not isinstance(value, Nest) or value.kind != kind:
        raise reader.fail(f"a {kind}")
    return value


def _read_argument(reader: Reader, depth: int) -> Argument:
    entries = reader.entries()
    if len(entries) != 1 or depth > DEEPEST_ARGUMENT:
        raise reader.fail(f"one argument, at most {DEEPEST_ARGUMENT} levels deep")
    ((kind, body),) = entries.items()
    if kind == "tensor":
        return _read_spec(body)
    if kind == "float":
        return Plain(_read_float(body))
    if kind == "value":
        if body.value is not None and not isinstance(body.value, bool | int | str):
            raise body.fail("null, true, false, a whole number or a string")
        return Plain(body.value)
    if kind in ("tuple", "list"):
        return Nest(kind, body.each(lambda item: _read_argument(item, depth + 1)))
    if kind == "dict":
        pairs = body.each(lambda row: _pair(row, lambda item: _read_argument(item, depth + 1)))
        keys = tuple(name for name, _ in pairs)
        if len(set(keys)) != len(keys):
            raise body.fail("keys that differ")
        return Nest("dict", tuple(value for _, value in pairs), keys)
    raise reader.fail("an argument")


def _read_float(reader: Reader) -> float:
    text = reader.text()
    try:
        value = float(text)
    except ValueError:
        raise reader.fail("a number in a string") from None
    if repr(value) != text:
        raise reader.fail("a number as Python writes it")
    return value
