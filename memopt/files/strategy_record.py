"""Strategies in plan files: the class by its name, its parameters by theirs.

Classes are found among those memopt itself knows, never imported by a name in a file. A strategy
of somebody else's is kept as a RecordedStrategy, which says what it was and cannot solve.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import memopt.strategies
from memopt.errors import PlanFileError
from memopt.models.codec import Reader
from memopt.models.device import Device
from memopt.strategies import STRATEGIES
from memopt.strategies.base import CostModel, Progress, Solution, Strategy

DEEPEST_STRATEGY = 8


@dataclass(frozen=True)
class RecordedStrategy(Strategy):
    """A strategy that is known by its name and parameters only; it cannot solve.

    Attributes:
        recorded_name: its `name`.
        class_name: its class.
        parameters: its fields, as (name, text).
    """

    name: ClassVar[str] = "recorded"
    needs: ClassVar[str] = "any"

    recorded_name: str
    class_name: str
    parameters: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        # The plan is shown under the strategy's own name, which is a class variable elsewhere.
        object.__setattr__(self, "name", self.recorded_name)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={text}" for name, text in self.parameters)
        return f"{self.class_name}({fields})"

    def why_not(self, cost_model: CostModel) -> str | None:
        """Always a reason: its code is not here."""
        return f"{self.class_name} was read from a plan file and its code is not part of memopt"

    def solve(
        self,
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        raise ValueError(f"{self.why_not(cost_model)}; pass your own instance to memopt.plan")


def known_classes() -> dict[str, type[Strategy]]:
    """Name → class, of the strategies that memopt has by name or exports."""
    exported = [
        value
        for value in vars(memopt.strategies).values()
        if isinstance(value, type) and issubclass(value, Strategy) and value is not Strategy
    ]
    return {kind.__name__: kind for kind in (*exported, *map(type, STRATEGIES))}


def encode_strategy(value: Strategy) -> dict[str, Any]:
    """A strategy as what `json` writes."""
    if isinstance(value, RecordedStrategy):
        fields: dict[str, Any] = dict(value.parameters)
        return _entry(value.recorded_name, value.class_name, False, fields)
    kind = type(value)
    known = known_classes().get(kind.__name__) is kind
    fields = {}
    for field in _fields(kind):
        content = getattr(value, field)
        fields[field] = _encode_value(content) if known else repr(content)
    return _entry(value.name, kind.__name__, known, fields)


def _entry(name: str, class_name: str, known: bool, fields: dict[str, Any]) -> dict[str, Any]:
    pairs = [[field, fields[field]] for field in fields]
    return {"name": name, "class": class_name, "known": known, "fields": pairs}


def _fields(kind: type[Strategy]) -> list[str]:
    if not dataclasses.is_dataclass(kind):
        return []
    return [field.name for field in dataclasses.fields(kind) if field.init]


def _encode_value(value: Any) -> Any:
    """Scalars as they are; what JSON lacks as an object of one field."""
    if isinstance(value, Enum):
        return _encode_value(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, tuple | list):
        return {"tuple": [_encode_value(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[str(key), _encode_value(item)] for key, item in value.items()]}
    if isinstance(value, Strategy):
        return {"strategy": encode_strategy(value)}
    raise PlanFileError(
        f"a strategy's parameter {value!r} cannot be written to a plan file: use numbers, "
        "strings, tuples and strategies"
    )


def read_strategy(reader: Reader, depth: int = 0) -> Strategy:
    """The strategy that `encode_strategy` wrote; a RecordedStrategy if its class is not known."""
    if depth > DEEPEST_STRATEGY:
        raise reader.fail(f"strategies at most {DEEPEST_STRATEGY} levels deep")
    name, class_name, known, fields = reader.fields("name", "class", "known", "fields")
    pairs = dict(fields.each(_read_pair))
    kind = known_classes().get(class_name.text())
    if not known.flag() or kind is None:
        parameters = tuple(
            (key, item.text() if isinstance(item.value, str) else repr(item.value))
            for key, item in pairs.items()
        )
        return RecordedStrategy(name.text(), class_name.text(), parameters)
    if kind.name != name.text() or not set(pairs) <= set(_fields(kind)):
        raise reader.fail(f"a {kind.__name__} of this memopt")
    values = {key: _read_value(item, depth) for key, item in pairs.items()}
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise PlanFileError(f"{reader.place}: {error}") from error


def _read_pair(reader: Reader) -> tuple[str, Reader]:
    row = reader.items()
    if len(row) != 2:
        raise reader.fail("[name, value]")
    return row[0].text(), row[1]


def _read_value(reader: Reader, depth: int) -> Any:
    value = reader.value
    if value is None or isinstance(value, bool | int | str):
        return value
    if not isinstance(value, dict) or len(value) != 1 or depth > DEEPEST_STRATEGY:
        raise reader.fail("a parameter of a strategy")
    ((kind, body),) = reader.entries().items()
    if kind == "float":
        try:
            return float(body.text())
        except ValueError:
            raise body.fail("a number in a string") from None
    if kind == "tuple":
        return body.each(lambda item: _read_value(item, depth + 1))
    if kind == "dict":
        return {key: _read_value(item, depth + 1) for key, item in body.each(_read_pair)}
    if kind == "strategy":
        return read_strategy(body, depth + 1)
    raise reader.fail("a parameter of a strategy")
