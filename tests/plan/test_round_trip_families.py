"""All families × strategies: saved, loaded in a new process, applied; the same step, to the bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import memopt
from memopt.api.plan import Plan
from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.profiler import Loss, MeasureOptions, Profiled, profile_model
from memopt.strategies import STRATEGIES, Strategy
from tests.plan.apply_saved import applied_elsewhere, program_digest, step_digest, subject
from tests.zoo import FAMILIES

TIME_LIMIT_S = 2.0
SHARE = 0.3
"""Budgets: so far from Rotor's smallest one to the baseline's peak."""
EXPECTED = re.compile(r"found no plan|cannot plan this model")
"""What a solver may say when its time is up, and a strategy that is for other cost models."""


def planned(one: Profiled, strategy: Strategy, budget: int) -> Plan | str:
    """A plan within the budget, else one without limit; or the EXPECTED reason why not."""
    refused = ""
    for limit in (budget, None):
        try:
            return memopt.plan(
                one, budget=limit, strategy=strategy, time_limit_s=TIME_LIMIT_S, progress=False
            )
        except InfeasibleBudgetError:
            assert limit is not None
        except (MemoptError, ValueError) as error:
            if not EXPECTED.search(str(error)):
                raise
            refused = f"{strategy.name}: {error}"
    return refused


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_family(name: str, tmp_path: Path) -> None:
    one = subject(f"zoo:{name}")
    model = one.build()
    options = MeasureOptions(cap_s=0.5, max_rounds=2)
    profiled = profile_model(model, one.inputs, loss=Loss(one.loss), options=options)
    least = memopt.plan(profiled, budget="min", strategy="rotor", progress=False).budget
    assert least is not None
    budget = least + int(SHARE * max(0, profiled.baseline.peak_bytes - least))
    expected, reasons = {}, []
    digest = step_digest(one, one.build())
    for strategy in STRATEGIES:
        plan = planned(profiled, strategy, budget)
        if isinstance(plan, str):
            reasons.append(plan)
            continue
        path = tmp_path / f"{strategy.name}.json"
        plan.save(path)
        expected[path] = [program_digest(plan.program), digest]
    print(f"{name}: {len(expected)} of {len(STRATEGIES)} strategies; {'; '.join(reasons)}")
    # Every family has a chain and a graph: only a solver's own limits leave one out.
    assert len(expected) >= len(STRATEGIES) - 4, reasons
    found = applied_elsewhere(dict.fromkeys(expected, f"zoo:{name}"), timeout_s=1500)
    assert found == expected
