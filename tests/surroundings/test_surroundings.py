"""What a forward touches around it is exact under every way to plan it, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.surroundings.judge import Verdict, allowed, judge, own, run, verdict_of
from tests.surroundings.seen import difference, seen
from tests.surroundings.situation import WAYS, Net, Setting, Situation
from tests.surroundings.table import SITUATIONS

CELLS = [
    pytest.param(one, way, id=f"{name}, {way}", marks=() if one.quick else pytest.mark.slow)
    for name, one in SITUATIONS.items()
    for way in one.ways
]


@pytest.mark.parametrize(("one", "way"), CELLS)
def test_exact_or_refused(one: Situation, way: str) -> None:
    verdict = judge(one, way)
    assert verdict.kind in allowed(one, way), verdict.reason


def test_the_table_is_large() -> None:
    assert len(SITUATIONS) >= 60
    assert all(one.ways and {*one.exact} <= {*one.ways} <= {*WAYS} for one in SITUATIONS.values())


COUNTED: list[int] = []


def counting() -> Setting:
    COUNTED.clear()
    return Setting(Net(), lambda: COUNTED, after=lambda _: COUNTED.append(1))


def further() -> Setting:
    made = counting()
    COUNTED.append(1)
    return made


def halved() -> Setting:
    torch.manual_seed(1)
    return counting()


def drawn() -> Setting:
    made = counting()
    made.before = lambda step: torch.rand(1) if step == 1 else None
    return made


@pytest.mark.parametrize(
    ("make", "where"),
    [(further, "world: 0 entries are 1"), (halved, "values differ"), (drawn, "random.torch")],
)
def test_the_judge_sees_a_difference(make: Callable[[], Setting], where: str) -> None:
    eager = run(counting, "eager")
    assert verdict_of(eager, run(counting, "eager")) == Verdict("exact", "3 calls planned")
    found = verdict_of(eager, run(make, "eager"))
    assert found.kind == "WRONG"
    assert where in found.reason


def test_none_is_no_gradient_of_zeros() -> None:
    one, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert not difference(seen([one]), seen([other]))
    assert difference(seen([one.grad]), seen([torch.zeros(2)]))
    assert difference(seen([one]), seen([other.detach()]))
    assert difference(seen({"a": 1}), seen({"a": True}))
    assert difference(seen({"a": 1}), seen({}))


def test_an_error_of_torchs_is_no_refusal() -> None:
    def fails() -> None:
        torch.ones(2) @ torch.ones(3)

    with pytest.raises(RuntimeError) as raised:
        fails()
    assert not own(raised.value)
