"""Strategies in plan files: known classes come back, others are shown by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import memopt
from memopt.errors import PlanFileError
from memopt.files.strategy_record import (
    RecordedStrategy,
    encode_strategy,
    known_classes,
    read_strategy,
)
from memopt.models.instances import rotor_toy
from memopt.models.reader import Reader
from memopt.strategies import STRATEGIES, Rotor, Sequential, StoreAll, Strategy


@dataclass(frozen=True)
class Mine(StoreAll):
    """A strategy from outside the package, with any parameter at all."""

    name: ClassVar[str] = "mine"
    how: object = (1, 2.5, "x")


def there_and_back(strategy: Strategy) -> Strategy:
    return read_strategy(Reader(encode_strategy(strategy), "strategy"))


@pytest.mark.parametrize("strategy", [*STRATEGIES, Rotor(slots=None), Sequential(segments=3)])
def test_known_ones_come_back(strategy: Strategy) -> None:
    assert there_and_back(strategy) == strategy
    assert type(there_and_back(strategy)) is type(strategy)


def test_a_foreign_one_is_kept_by_name(tmp_path: Path) -> None:
    plan = memopt.plan(rotor_toy(), strategy=Mine(how=object))
    plan.save(tmp_path / "plan.json")
    loaded = memopt.load(tmp_path / "plan.json")
    found = loaded.strategy
    assert isinstance(found, RecordedStrategy)
    assert found.name == "mine"
    assert repr(found) == "Mine(how=<class 'object'>)"
    assert there_and_back(found) == found
    assert "Mine(how=" in loaded.summary()
    with pytest.raises(ValueError, match="not part of memopt"):
        memopt.plan(rotor_toy(), strategy=found)
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_a_namesake_is_foreign() -> None:
    @dataclass(frozen=True)
    class Rotor(StoreAll):
        """Not memopt's."""

    assert known_classes()["Rotor"] is not Rotor
    assert isinstance(there_and_back(Rotor()), RecordedStrategy)


@pytest.mark.parametrize(
    "change",
    [
        {"fields": [["slots", -3]]},
        {"fields": [["slots", "many"]]},
        {"fields": [["nosuch", 3]]},
        {"fields": [["slots"]]},
        {"fields": [["slots", {"float": "x"}]]},
        {"fields": [["slots", {"strategy": 3}]]},
        {"fields": [["slots", {"code": "print()"}]]},
        {"fields": {"slots": 3}},
        {"name": "other"},
        {"known": "yes"},
        {"class": None},
    ],
)
def test_wrong_records(change: dict[str, object]) -> None:
    with pytest.raises(PlanFileError):
        read_strategy(Reader({**encode_strategy(Rotor()), **change}, "strategy"))


def test_deep_nesting_is_refused() -> None:
    value: object = 1
    for _ in range(50):
        value = {"tuple": [value]}
    record = {**encode_strategy(Rotor()), "fields": [["slots", value]]}
    with pytest.raises(PlanFileError):
        read_strategy(Reader(record, "strategy"))
