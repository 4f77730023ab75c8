"""Plans whole steps with parameters on the host and their activations moved or recomputed."""

from __future__ import annotations

import itertools
import math

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.programs.solution import Solution
from memopt.solvers.running import Deadline
from memopt.strategies.base import Strategy
from memopt.strategies.moving.on_host import without_host_updates
from memopt.strategies.moving.planning import Limits, planned_moves
from memopt.strategies.shared.chain_programs import programs_of_step

OFFLOAD_SHARE = 0.4
"""Share of the time for offload-graph."""


def plan_moved(
    graph: Graph,
    budget_bytes: int | None,
    device: Device,
    mover: Strategy,
    host_bytes: float,
    exact_only: bool,
    deadline: Deadline,
    name: str,
) -> Solution:
    """Return the faster of offload-graph's plan and Rotor's programs with their parameters moved.

    Args:
        graph: a whole step with movable tensors.
        budget_bytes, device: as in `Strategy.solve`.
        mover: plans without recomputation, under the same host budget and kinds of updates.
        host_bytes: the most that may be on the host.
        exact_only: leave out updates on the host that round differently from the device's.
        deadline: of the search.
        name: the strategy's, for messages.
    """
    limit_s = None if math.isinf(deadline.left_s) else OFFLOAD_SHARE * deadline.left_s
    moved = mover.solve(
        graph, budget_bytes, device=device, time_limit_s=limit_s, progress=deadline.progress
    )
    if budget_bytes is None:
        return moved
    limits = Limits(budget_bytes, host_bytes, deadline)
    bases = (("rotor", program) for program in programs_of_step(graph, budget_bytes))
    graph = without_host_updates(graph, inexact_only=True) if exact_only else graph
    first = next(bases, None)
    if first is None:
        return moved
    return planned_moves(graph, device, limits, itertools.chain([first], bases), name, moved)
