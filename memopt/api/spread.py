"""Budgets spread evenly over what a model can use."""

from __future__ import annotations

from memopt.models.graph import Graph
from memopt.plan_record import BaselineFigures
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay


def budgets_between(floor: int, enough: int, points: int) -> tuple[int, ...]:
    """`points` budgets (at least 2) from `floor` to `enough`, bytes, evenly, each once."""
    above = max(0, enough - floor)
    spread = (floor + above * number // (points - 1) for number in range(points))
    return tuple(dict.fromkeys(spread))


def enough_bytes(graph: Graph, baseline: BaselineFigures) -> int:
    """What suffices without a plan: the baseline's peak, or that of the same operators as a program
    where it is larger (a framework may free a tensor inside an operator, a program cannot)."""
    return max(baseline.peak_bytes, replay(graph, store_all(graph)).peak_bytes)
