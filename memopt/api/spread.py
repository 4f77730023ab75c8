"""Budgets spread evenly over what a model can use."""

from __future__ import annotations

from memopt.models.graph import Graph
from memopt.plan_record import BaselineFigures
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay


def budgets_between(floor: int, enough: int, points: int) -> tuple[int, ...]:
    """Spread `points` budgets (at least 2) evenly from `floor` to `enough`, bytes, each once."""
    above = max(0, enough - floor)
    spread = (floor + above * number // (points - 1) for number in range(points))
    return tuple(dict.fromkeys(spread))


def enough_bytes(graph: Graph, baseline: BaselineFigures) -> int:
    """Return the bytes that suffice without a plan: the baseline's peak, or if larger that of the
    graph's own order (a framework may free a tensor inside an operator, a program cannot)."""
    return max(baseline.peak_bytes, replay(graph, store_all(graph)).peak_bytes)
