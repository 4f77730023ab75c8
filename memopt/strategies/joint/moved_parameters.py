"""Whole steps whose parameters may live on the host, their activations moved or recomputed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.programs.instructions import Program
from memopt.reductions.stage_map import has_updates
from memopt.reductions.step_linearization import linearize_step
from memopt.strategies.base import Solution
from memopt.strategies.moving.on_host import without_host_updates
from memopt.strategies.moving.planning import Limits, fixed_graph, planned_moves
from memopt.strategies.offload.graph import OffloadGraph
from memopt.strategies.rotor.strategies import Rotor
from memopt.strategies.solvers.running import Deadline

SHARES = (0.9, 0.6, 0.35, 0.2, 0.1)
"""Of the room beside what is resident, what activations may take; the rest is for parameters."""
OFFLOAD_SHARE = 0.4
"""Of the time, what offload-graph may take."""


def plan_moved(
    graph: Graph,
    budget_bytes: int | None,
    device: Device,
    mover: OffloadGraph,
    deadline: Deadline,
    name: str,
) -> Solution:
    """The fastest of offload-graph's plan and of Rotor's programs with their parameters moved.

    Args:
        graph: a whole step with movable tensors.
        budget_bytes, device: as of `Strategy.solve`.
        mover: plans without recomputation; its host budget and its updates are the plan's.
        deadline: of the search.
        name: the strategy's, for messages.
    """
    limit_s = None if math.isinf(deadline.left_s) else OFFLOAD_SHARE * deadline.left_s
    moved = mover.solve(
        graph, budget_bytes, device=device, time_limit_s=limit_s, progress=deadline.progress
    )
    if budget_bytes is None:
        return moved
    host_budget = mover.host_budget_bytes
    limits = Limits(budget_bytes, math.inf if host_budget is None else host_budget, deadline)
    bases = (("rotor", program) for program in recomputed(graph, budget_bytes))
    graph = without_host_updates(graph, inexact_only=True) if mover.exact_only else graph
    first = next(bases, None)
    if first is None:
        return moved
    return planned_moves(graph, device, limits, itertools.chain([first], bases), name, moved)


def recomputed(graph: Graph, budget_bytes: int) -> Iterator[Program]:
    """Rotor's programs of a whole step whose activations take some of the room."""
    if not has_updates(graph):
        return
    resident = fixed_graph(graph)
    view = linearize_step(resident)
    room = budget_bytes - (graph.resident_bytes - graph.movable_bytes)
    for share in SHARES:
        found = Rotor().solve(view.chain, graph.resident_bytes + int(share * room))
        steps = found.steps if found.smallest is None else found.smallest.steps
        if steps is not None:
            yield view.lower(steps)
