"""Real models' plans that move tensors: nothing of a training step is unordered."""

from __future__ import annotations

from functools import partial

import pytest

import memopt
from memopt.executor.module import PlannedModule
from memopt.models.device import Device
from memopt.programs.instructions import SwapOut
from tests.executor.harness import Prepared
from tests.families.harness import Subject, subject
from tests.races.judge import Judge
from tests.races.judged import complaints, judged
from tests.zoo import FAMILIES, Family, call

LINK = Device(to_host_bytes_per_s=12e9, transfer_latency_s=1e-5)
QUICK = ("mlp",)


def two_steps(one: Subject, judge: Judge, planned: PlannedModule) -> None:
    """Two training steps; the second leases the first one's pool."""
    inputs = one.family.inputs("tiny")
    for _ in range(2):
        one.family.loss(call(planned, inputs)).backward()
        one.model.zero_grad(set_to_none=True)


def check(family: Family, strategy: str, share: float) -> None:
    """Judge the plan at floor + share x (baseline - floor)."""
    one = subject(family)
    profiled = one.profiled
    ask = partial(memopt.plan, profiled, strategy=strategy, device=LINK, progress=False)
    floor = ask(budget="min").budget
    assert floor is not None
    plan = ask(budget=floor + int(share * max(0, profiled.baseline.peak_bytes - floor)))
    prepared = Prepared(one.model, profiled.captured, profiled.lowering)
    judge = judged(prepared, plan.program, partial(two_steps, one))
    assert complaints(judge) == []
    moved = sum(isinstance(one, SwapOut) for one in plan.program)
    assert judge.launches.get("out", 0) == 2 * moved
    assert judge.launches["compute"] > len(profiled.lowering.graph.operators)


@pytest.mark.parametrize("family", [f for f in FAMILIES if str(f) in QUICK], ids=str)
def test_at_the_smallest_budget(family: Family) -> None:
    check(family, "offload-graph", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("strategy", ["offload-graph", "dynprog", "greedy"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_budget(family: Family, strategy: str, share: float) -> None:
    check(family, strategy, share)
