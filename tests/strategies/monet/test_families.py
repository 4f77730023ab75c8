"""The fourteen families under monet and rotor-menus: the same bits, within the budget."""

from __future__ import annotations

import pytest

import memopt
from tests.families.harness import check, floor_plan, subject
from tests.zoo import FAMILIES, Family

SHARES = (0.0, 0.25, 0.5)
LIMIT_S = 10.0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["monet", "rotor-menus"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_three_steps_within_the_budget(family: Family, strategy: str) -> None:
    one = subject(family)
    rotor = floor_plan(one, "rotor")
    floor_bytes, peak_bytes = rotor.budget, one.profiled.baseline.peak_bytes
    assert floor_bytes is not None
    for share in SHARES:
        budget = floor_bytes + int(share * max(0, peak_bytes - floor_bytes))
        plan = memopt.plan(
            one.profiled, budget=budget, strategy=strategy, time_limit_s=LIMIT_S, progress=False
        )
        plain = memopt.plan(one.profiled, budget=budget, strategy="rotor", progress=False)
        assert plan.step_time_s <= plain.step_time_s * (1 + 1e-9)
        check(one, plan)
