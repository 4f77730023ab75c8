"""Orders and addresses of plans that recompute and move real models' tensors."""

from __future__ import annotations

import pytest

import memopt
from memopt.models.graph import Graph
from memopt.models.linearize import linearize
from memopt.models.liveness import store_all
from memopt.models.lower import lower_steps
from memopt.models.presets import find_device
from memopt.models.program import Compute, Program, SwapIn
from memopt.models.replay import replay
from memopt.models.validate import validate
from memopt.strategies.base import Solution, Strategy
from memopt.strategies.offload.dynprog import DynProg
from memopt.strategies.offload.graph import OffloadGraph
from memopt.strategies.olla import order_program, place_program
from memopt.strategies.rotor.persistent import Rotor
from tests import zoo

DEVICE = "A100"
GAP = 0.01
NAMES = [
    pytest.param("vgg16"),
    *(
        pytest.param(family.name, marks=pytest.mark.slow)
        for family in zoo.FAMILIES
        if family.name != "vgg16"
    ),
]
STRATEGIES: tuple[Strategy, ...] = (
    Rotor(exact_stages=0),
    DynProg(),
    OffloadGraph(moves=0, chain=False),
)


def plans(graph: Graph, strategy: Strategy) -> list[Program]:
    """Different programs at the smallest budget and half-way to the baseline."""
    view = linearize(graph) if strategy.needs == "chain" else None
    target = graph if view is None else view.chain

    def attempt(budget_bytes: int) -> Solution:
        return strategy.solve(target, budget_bytes, device=find_device(DEVICE))

    floor_bytes = attempt(1).smallest_budget_bytes
    assert floor_bytes is not None
    found: dict[Program, None] = {}
    for share in (0.0, 0.5):
        over_bytes = max(0, replay(graph, store_all(graph)).peak_bytes - floor_bytes)
        solution = attempt(int(floor_bytes + share * over_bytes))
        program = solution.program
        if view is not None:
            assert solution.steps is not None
            program = lower_steps(view, solution.steps)
        assert program is not None
        found[program] = None
    return list(found)


@pytest.mark.parametrize("name", NAMES)
def test_plans_that_recompute_and_move_are_placed_within_a_percent(name: str) -> None:
    family = zoo.get(name)
    graph = memopt.profile(
        family.build("tiny"), family.inputs("tiny"), device=DEVICE, mode="estimate", progress=False
    )
    again = moved = 0
    for strategy in STRATEGIES:
        for program in plans(graph, strategy):
            again += sum(isinstance(x, Compute) for x in program) - len(graph.operators)
            moved += sum(isinstance(x, SwapIn) for x in program)
            ordered, ordering = order_program(graph, program)
            assert validate(graph, ordered) is None
            assert ordering.gap <= GAP
            assert replay(graph, ordered).peak_bytes <= replay(graph, program).peak_bytes
            for one in (program, ordered):
                placed, placement = place_program(graph, one)
                assert validate(graph, placed) is None
                assert placement.gap <= GAP
    assert again > 0
    assert moved > 0
