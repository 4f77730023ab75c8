"""The fourteen families under store-all, sequential and rotor: exact, and within the budget."""

from __future__ import annotations

import pytest

import memopt
from tests.families.harness import budgets, check, floor_plan, infeasible_below, subject
from tests.zoo import FAMILIES, Family, get

STRATEGIES = ("store-all", "sequential", "rotor")
SHARES = (0.0, 0.25, 0.5, 0.75)
# What the other families have, each kind of it once: batch norm and residuals, ReLU6 and depthwise
# convolutions, skips across the model, dropout and tied weights, rotary embeddings. The slow test
# below runs all fourteen everywhere.
KINDS = [get(name) for name in ("resnet50", "mobilenet_v2", "unet", "gpt2", "llama", "mlp")]


LONGEST = ("densenet121", "efficientnet_b0", "googlenet", "inception_v3")
"""More than a minute together at their floors, which the slow test below has, too."""


@pytest.mark.parametrize("family", [f for f in FAMILIES if str(f) not in LONGEST], ids=str)
def test_rotor_floor(family: Family) -> None:
    one = subject(family)
    plan = floor_plan(one, "rotor")
    check(one, plan)
    assert infeasible_below(one, plan)


@pytest.mark.parametrize("family", KINDS, ids=str)
def test_rotor_interpreted(family: Family) -> None:
    one = subject(family)
    check(one, floor_plan(one, "rotor"), interpreted=True)


@pytest.mark.slow  # test_every_budget
@pytest.mark.parametrize("family", KINDS, ids=str)
def test_rotor_half(family: Family) -> None:
    one = subject(family)
    (budget,) = budgets(one, "rotor", (0.5,))
    check(one, memopt.plan(one.profiled, budget=budget, strategy="rotor", progress=False))


@pytest.mark.parametrize("family", KINDS, ids=str)
def test_store_all(family: Family) -> None:
    one = subject(family)
    check(one, memopt.plan(one.profiled, strategy="store-all", progress=False))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_budget(family: Family, strategy: str) -> None:
    one = subject(family)
    for budget in budgets(one, strategy, SHARES):
        plan = memopt.plan(one.profiled, budget=budget, strategy=strategy, progress=False)
        check(one, plan)
        check(one, plan, interpreted=True)
