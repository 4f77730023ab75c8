"""memopt.plan(model, strategy="monet"): alternatives attached, chosen, run exactly."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import memopt
from memopt.kernels import FAMILIES, with_implementations
from memopt.pricing.memory import metered
from memopt.profiler.session import profile_model
from memopt.programs.instructions import Compute
from memopt.step.backend import backend_of
from memopt.strategies import Monet
from tests.kernels.test_in_plans import QUICK, three_steps
from tests.kernels.test_own_family import CALLS, attach_log_sigmoid


def small_cnn() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU6(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 4),
    )
    return model, torch.rand(8, 3, 32, 32)


def chosen(plan: memopt.Plan) -> set[str]:
    assert plan.program is not None
    return {i.implementation for i in plan.program if isinstance(i, Compute) and i.implementation}


def test_monet_chooses_alternatives_below_rotors_floor_and_trains_exactly() -> None:
    model, x = small_cnn()
    unplanned = copy.deepcopy(model)
    with pytest.raises(memopt.InfeasibleBudgetError):
        memopt.plan(model, x, strategy="rotor", budget=0.8, cache=False, progress=False)
    plan = memopt.plan(model, x, strategy="monet", budget=0.8, cache=False, progress=False)
    assert plan.budget is not None
    assert chosen(plan)
    module = plan.apply(model)
    found, expected = three_steps(module, x), three_steps(unplanned, x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    model.zero_grad()
    with metered(torch.device("cpu")) as use:
        y = module(x)
        y.backward(torch.ones_like(y))
    assert (
        plan.resident_bytes - backend_of("cpu").step_scalars_bytes + use.peak_bytes <= plan.budget
    )


def test_other_strategies_and_defaults_stay_exact() -> None:
    model, x = small_cnn()
    plan = memopt.plan(model, x, strategy="monet", cache=False, progress=False)
    assert plan.graph is not None
    choices = [c for o in plan.graph.operators for c in o.implementations]
    assert choices
    assert all(c.exact for c in choices)
    plain = memopt.plan(model, x, strategy="checkmate", cache=False, progress=False)
    assert plain.graph is not None
    assert not any(o.implementations for o in plain.graph.operators)


def test_monet_considers_an_own_family_whose_plan_file_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.LogSigmoid(), nn.Linear(64, 64), nn.LogSigmoid()]
    model, x = nn.Sequential(*layers, nn.Linear(64, 2)), torch.rand(256, 16)
    another = copy.deepcopy(model)
    profiled = profile_model(model, x, options=QUICK)
    families = (*FAMILIES, ("log-sigmoid", attach_log_sigmoid))
    profiled = with_implementations(profiled, families=families, options=QUICK)
    # A kernel that takes no time is worth choosing, whatever this machine measures.
    operators = [
        replace(o, implementations=tuple(replace(c, time_s=0.0) for c in o.implementations))
        for o in profiled.graph.operators
    ]
    profiled = replace(profiled, graph=replace(profiled.graph, operators=operators))
    plan = memopt.plan(profiled, strategy=Monet(exact_only=False), progress=False)
    assert chosen(plan) == {"output"}
    CALLS.clear()
    plan.apply(model)(x).sum().backward()
    assert CALLS
    path = tmp_path / "own.json"
    plan.save(path)
    with pytest.raises(memopt.PlanFileError, match="your own families"):
        memopt.load(path).apply(another, x)
