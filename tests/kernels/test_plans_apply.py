"""plan() of a profiled model with alternatives: applied to its model and to another one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

import memopt
from memopt.kernels import with_implementations
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.profiler.session import profile_model
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.strategies.base import CostModel, Features, Strategy
from tests.kernels.test_in_plans import QUICK, choosing, cnn, three_steps


@dataclass(frozen=True)
class Masks(Strategy):
    """Every operator once, with bits for masks and bytes for indices."""

    name: ClassVar[str] = "masks"
    needs: ClassVar[str] = "graph"
    features: ClassVar[Features] = Features(implementations=True)

    def solve(self, cost_model: CostModel, budget_bytes: int | None, **_: Any) -> Solution:
        assert isinstance(cost_model, Graph)
        program, _used = choosing(cost_model, ("bitmask", "index8", "input"))
        figures = replay(cost_model, program)
        return Solution(
            Status.FEASIBLE,
            program=program,
            peak_bytes=figures.peak_bytes,
            time_s=figures.time_s,
        )


def test_a_plan_with_implementations_is_applied() -> None:
    torch.manual_seed(0)
    model, x = cnn()
    unplanned, another = copy.deepcopy(model), copy.deepcopy(model)
    profiled = profile_model(model, x, options=QUICK)
    profiled = with_implementations(profiled, exact_only=True, options=QUICK)
    plan = memopt.plan(profiled, strategy=Masks(), progress=False)
    expected = three_steps(unplanned, x)
    for found in (three_steps(plan.apply(model), x), three_steps(plan.apply(another, x), x)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_saved_plan_with_implementations_is_applied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = cnn()
    unplanned, another = copy.deepcopy(model), copy.deepcopy(model)
    profiled = profile_model(model, x, options=QUICK)
    profiled = with_implementations(profiled, exact_only=True, options=QUICK)
    path = tmp_path / "masks.json"
    memopt.plan(profiled, strategy=Masks(), progress=False).save(path)
    found = three_steps(memopt.load(path).apply(another, x), x)
    expected = three_steps(unplanned, x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
