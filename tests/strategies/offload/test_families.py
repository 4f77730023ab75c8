"""Offloaded plans of the fourteen families: exact, within the budget, host bytes as predicted."""

from __future__ import annotations

import gc

import pytest

import memopt
from memopt.api.plan import Plan
from memopt.executor.apply import runtime_of
from memopt.executor.install import install
from memopt.executor.module import PlannedModule
from memopt.executor.swap import ThreadSwap
from memopt.models.device import Device
from memopt.programs.instructions import SwapOut
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.step.backend import backend_of
from tests.families.harness import PEAK_TOLERANCE, Subject, compare, subject, train
from tests.zoo import FAMILIES, Family

LINK = Device(to_host_bytes_per_s=12e9, transfer_latency_s=1e-5)
SHARES = (0.0, 0.25, 0.5)
QUICK = ("unet", "mlp", "gpt2")


def offloaded(one: Subject, strategy: str, budget: int | str) -> Plan:
    return memopt.plan(one.profiled, budget=budget, strategy=strategy, device=LINK, progress=False)


def check_offloaded(one: Subject, plan: Plan) -> None:
    """Three optimizer steps, bit for bit; device peak and host peak as predicted."""
    assert plan.program is not None
    one.model.load_state_dict(one.initial)
    one.model.zero_grad(set_to_none=True)
    captured, swap = one.profiled.captured, ThreadSwap()
    installed = install(captured, one.profiled.lowering, plan.program, swap=swap)
    planned = PlannedModule(one.model, captured, runtime_of(captured), installed)
    trace = train(one.family, planned)
    compare(one.reference, trace)
    gc.collect()
    measured = plan.resident_bytes - backend_of("cpu").step_scalars_bytes + trace.peak_bytes
    assert plan.budget is not None
    assert measured <= plan.budget
    assert abs(measured - plan.peak_bytes) <= PEAK_TOLERANCE * plan.peak_bytes
    assert swap.account.peak_bytes == plan.host_peak_bytes
    assert swap.account.now_bytes == 0


def check_shares(family: Family, strategy: str, shares: tuple[float, ...]) -> None:
    one = subject(family)
    floor = offloaded(one, strategy, "min").budget
    assert floor is not None
    base = one.profiled.baseline.peak_bytes
    for share in shares:
        plan = offloaded(one, strategy, floor + int(share * max(0, base - floor)))
        check_offloaded(one, plan)
        graph = one.profiled.graph
        assert plan.program is not None
        assert plan.budget is not None
        # VGG's floor is what its step needs in any case: there is nothing to gain.
        if replay(graph, store_all(graph)).peak_bytes > plan.budget:
            assert any(isinstance(i, SwapOut) for i in plan.program)


@pytest.mark.parametrize("family", [f for f in FAMILIES if str(f) in QUICK], ids=str)
def test_graph_floor(family: Family) -> None:
    check_shares(family, "offload-graph", (0.0,))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["offload-graph", "dynprog"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_budget(family: Family, strategy: str) -> None:
    check_shares(family, strategy, SHARES)
