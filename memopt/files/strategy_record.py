"""Strategies in plan files: the names of the class and of its parameters, with their values.

Only classes that memopt knows are made; nothing is imported by a name in a file. Any other strategy
becomes a RecordedStrategy, which shows its name and parameters and cannot solve.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, TypeAlias

import memopt.strategies
from memopt.errors import PlanFileError
from memopt.models.codec import Codec
from memopt.models.device import Device
from memopt.models.reader import Reader
from memopt.programs.solution import Solution
from memopt.strategies import STRATEGIES
from memopt.strategies.base import CostModel, Progress, Strategy

DEEPEST_STRATEGY = 8


@dataclass(frozen=True)
class RecordedStrategy(Strategy):
    """A strategy that is known by its name and parameters only; it cannot solve.

    Attributes:
        recorded_name: the strategy's `name`.
        class_name: the name of its class.
        parameters: its fields, as (name, text).
    """

    name: ClassVar[str] = "recorded"
    needs: ClassVar[str] = "any"

    recorded_name: str
    class_name: str
    parameters: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        # The plan is shown under the strategy's own name; in other classes it is a class variable.
        object.__setattr__(self, "name", self.recorded_name)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={text}" for name, text in self.parameters)
        return f"{self.class_name}({fields})"

    def why_not(self, cost_model: CostModel) -> str | None:
        """Return a reason always: the strategy's code is not here."""
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
    """Map names to classes: the strategies that memopt has by name or exports."""
    exported = [
        value
        for value in vars(memopt.strategies).values()
        if isinstance(value, type) and issubclass(value, Strategy) and value is not Strategy
    ]
    return {kind.__name__: kind for kind in (*exported, *map(type, STRATEGIES))}


def encode_strategy(value: Strategy) -> dict[str, Any]:
    """Convert a strategy to plain JSON values."""
    kind = type(value)
    name, class_name = value.name, kind.__name__
    known = known_classes().get(class_name) is kind
    if isinstance(value, RecordedStrategy):
        name, class_name, known = value.recorded_name, value.class_name, False
        pairs: list[Any] = [list(pair) for pair in value.parameters]
    else:
        write = _encode_value if known else repr
        pairs = [[field, write(getattr(value, field))] for field in _fields(kind)]
    return {"name": name, "class": class_name, "known": known, "fields": pairs}


def _fields(kind: type[Strategy]) -> list[str]:
    if not dataclasses.is_dataclass(kind):
        return []
    return [field.name for field in dataclasses.fields(kind) if field.init]


def _encode_value(value: Any) -> Any:
    """Return scalars as they are, and values that JSON lacks as an object of one field."""
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
    """Read what `encode_strategy` wrote; a strategy of unknown class is a RecordedStrategy."""
    if depth > DEEPEST_STRATEGY:
        raise reader.fail(f"strategies at most {DEEPEST_STRATEGY} levels deep")
    found = reader.fields("name", "class", "known", "fields")
    name, class_name = found["name"].text(), found["class"].text()
    pairs = dict(found["fields"].pairs())
    kind = known_classes().get(class_name)
    if not found["known"].flag() or kind is None:
        parameters = tuple(
            (key, item.text() if isinstance(item.value, str) else repr(item.value))
            for key, item in pairs.items()
        )
        return RecordedStrategy(name, class_name, parameters)
    if kind.name != name or not set(pairs) <= set(_fields(kind)):
        raise reader.fail(f"a {kind.__name__} of this memopt")
    values = {key: _read_value(item, depth) for key, item in pairs.items()}
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise PlanFileError(f"{reader.place}: {error}") from error


def _read_value(reader: Reader, depth: int) -> Any:
    value, wanted = reader.value, "a parameter of a strategy"
    if value is None or isinstance(value, bool | int | str):
        return value
    kind, body = reader.only_entry(wanted)
    if depth > DEEPEST_STRATEGY:
        raise reader.fail(wanted)
    if kind == "float":
        return body.number_text()
    if kind == "tuple":
        return body.each(lambda item: _read_value(item, depth + 1))
    if kind == "dict":
        return {key: _read_value(item, depth + 1) for key, item in body.pairs()}
    if kind == "strategy":
        return read_strategy(body, depth + 1)
    raise reader.fail(wanted)


StrategyRecord: TypeAlias = Annotated[Strategy, Codec(encode_strategy, read_strategy)]
"""A strategy in a file."""
