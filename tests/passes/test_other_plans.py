"""Orders and addresses of plans that recompute and move real models' tensors."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import memopt
from memopt.models.budget import Budget
from memopt.models.graph import Graph
from memopt.models.presets import find_device
from memopt.passes.order_and_place import MOST_SLOWER, order_and_place
from memopt.programs.instructions import Compute, Program, SwapIn
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.programs.validate import validate
from memopt.reductions.linearize import linearize
from memopt.reductions.lower import lower_steps
from memopt.strategies.base import Strategy
from memopt.strategies.offload.dynprog import DynProg
from memopt.strategies.offload.graph import OffloadGraph
from memopt.strategies.olla import order_program, place_program
from memopt.strategies.rotor import Rotor
from tests import zoo

DEVICE = "A100"
GAP = 0.01
STRATEGIES: dict[str, Strategy] = {
    "rotor": Rotor(exact_stages=0),
    "dynprog": DynProg(),
    "offload-graph": OffloadGraph(moves=0, chain=False),
}


def names() -> list[Any]:
    """Families; all but VGG-16 slow."""
    return [
        pytest.param(family.name, marks=[] if family.name == "vgg16" else [pytest.mark.slow])
        for family in zoo.FAMILIES
    ]


def cases() -> list[Any]:
    """Every strategy's plans of every family; VGG-16's in the default tests."""
    return [
        pytest.param(
            family.name,
            strategy,
            marks=[] if family.name == "vgg16" else [pytest.mark.slow],
        )
        for family in zoo.FAMILIES
        for strategy in STRATEGIES
    ]


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


@functools.cache
def graph_of(name: str) -> Graph:
    family = zoo.get(name)
    return memopt.profile(
        family.build("tiny"), family.inputs("tiny"), device=DEVICE, mode="estimate", progress=False
    )


@functools.cache
def arranged(name: str, strategy: str) -> tuple[tuple[Program, Program, float], ...]:
    """The plans, reordered, with the gaps of the orders."""
    graph = graph_of(name)
    found = []
    for program in plans(graph, STRATEGIES[strategy]):
        ordered, ordering = order_program(graph, program)
        found.append((program, ordered, ordering.gap))
    return tuple(found)


@pytest.mark.parametrize("name", names())
def test_plans_that_recompute_and_move_are_reordered(name: str) -> None:
    graph = graph_of(name)
    again = moved = 0
    for strategy in STRATEGIES:
        for program, ordered, gap in arranged(name, strategy):
            again += sum(isinstance(x, Compute) for x in program) - len(graph.operators)
            moved += sum(isinstance(x, SwapIn) for x in program)
            assert validate(graph, ordered) is None
            assert gap <= GAP
            assert replay(graph, ordered).peak_bytes <= replay(graph, program).peak_bytes
            for one in (program, ordered):
                placed, _ = place_program(graph, one, work_limit=50_000_000)
                assert validate(graph, placed) is None
    assert again > 0
    assert moved > 0


@pytest.mark.parametrize(("name", "strategy"), cases())
def test_plans_are_placed_within_a_percent(name: str, strategy: str) -> None:
    graph, device = graph_of(name), find_device(DEVICE)
    gaps = []
    for program, ordered, _ in arranged(name, strategy):
        for one in (program, ordered):
            placed, stats = order_and_place(graph, one, Budget(), device, order=False, place=True)
            violation = validate(graph, placed)
            slower = replay(graph, placed, device).time_s / replay(graph, one, device).time_s
            assert violation is None
            assert slower <= 1 + MOST_SLOWER
            gap = stats["arena_gap"]
            assert isinstance(gap, float)
            gaps.append(gap)
    assert max(gaps) <= GAP
