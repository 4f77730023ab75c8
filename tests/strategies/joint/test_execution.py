"""Joint plans really run: bit for bit, within the budget, host bytes as predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

import memopt
from memopt.models.device import Device
from memopt.programs.instructions import Compute, SwapOut
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.strategies import Joint
from tests.families.harness import Subject, subject
from tests.strategies.offload.test_families import check_offloaded
from tests.zoo import FAMILIES, Family, get

SLOW_LINK = Device(to_host_bytes_per_s=2e8, from_host_bytes_per_s=3e8, transfer_latency_s=2e-5)
"""Moving all that a tiny step saves takes longer than the step."""
SHARES = (0.0, 0.25, 0.5)


def check_run(one: Subject, plan: memopt.Plan) -> set[str]:
    """Run a plan; what it uses."""
    assert plan.program is not None
    # Planned over the alternatives that planning has found.
    assert plan.profiled is not None
    check_offloaded(replace(one, profiled=plan.profiled), plan)
    runs = [x.op for x in plan.program if isinstance(x, Compute)]
    moves = any(isinstance(x, SwapOut) for x in plan.program)
    return {*(["moves"] * moves), *(["recomputes"] * (len(runs) > len(set(runs))))}


def check_shares(family: Family, shares: tuple[float, ...], strategy: Joint) -> None:
    """Plan and run at floor + share (baseline - floor); the plans move or recompute something."""
    one, uses = subject(family), set[str]()
    how = {"strategy": strategy, "device": SLOW_LINK, "progress": False}
    least = memopt.plan(one.profiled, budget="min", time_limit_s=30.0, **how).budget
    assert least is not None
    base = one.profiled.baseline.peak_bytes
    for share in shares:
        budget = least + int(share * max(0, base - least))
        plan = memopt.plan(one.profiled, budget=budget, time_limit_s=30.0, **how)
        uses |= check_run(one, plan)
    graph = one.profiled.graph
    # VGG's floor is what its step needs in any case: there is nothing to gain.
    assert uses or least >= replay(graph, store_all(graph)).peak_bytes


def test_a_plan_that_moves_and_recomputes() -> None:
    one = subject(get("gpt2"))
    resident, peak = one.profiled.graph.resident_bytes, one.profiled.baseline.peak_bytes
    plan = memopt.plan(
        one.profiled, budget=(resident + peak) // 2, strategy=Joint(changes=100), device=SLOW_LINK,
        progress=False, time_limit_s=5.0,
    )  # fmt: skip
    assert check_run(one, plan) == {"moves", "recomputes"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_family(family: Family) -> None:
    check_shares(family, SHARES, Joint(changes=1000))
