"""Plans of whole steps whose parameters and optimizer state live on the host, for the ladder."""

from __future__ import annotations

from dataclasses import replace

from memopt.api.reserved import reserved_bytes
from memopt.api.solving import solve
from memopt.errors import InfeasibleBudgetError, InvalidProgramError
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.plan_record import PlanRecord
from memopt.programs.in_place import with_in_place
from memopt.programs.replay import replay
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.strategies import resolve
from memopt.strategies.moving.planning import SCOUTS, fixed_graph
from memopt.strategies.moving.stays import MovedBase

_SHARES = (0.7, 0.3)
"""Of the room, for activations; the rest is for moved tensors."""


def moved_plan(graph: Graph, budget_bytes: int, device: Device) -> PlanRecord | int | None:
    """Plan a whole step with movable tensors on the host as far as the budget requires, such that
    the allocator reserves no more than the device has.

    Activations are recomputed by `rotor` within a share of the room, with every movable tensor
    resident; which of those move then, and when, `memopt.strategies.moving.stays` decides.

    Returns:
        The plan, validated; the least bytes known to be enough; or None: nothing is known.
    """
    card_bytes, limit = device.capacity_bytes, budget_bytes
    for _ in range(2):
        found = _within(graph, limit, device)
        excess = 0
        if isinstance(found, PlanRecord) and card_bytes is not None:
            excess = reserved_bytes(found) - card_bytes
        if excess <= 0:
            return found
        limit -= excess
    return None


def _within(graph: Graph, budget_bytes: int, device: Device) -> PlanRecord | int | None:
    resident = fixed_graph(graph)
    room = budget_bytes - (graph.resident_bytes - graph.movable_bytes)
    limits = [graph.resident_bytes + int(share * room) for share in _SHARES] if room > 0 else []
    enough: list[int] = []
    while limits:
        limit = limits.pop(0)
        try:
            base = solve(resident, limit, resolve("rotor"), device=device)
        except InfeasibleBudgetError as error:
            least = error.smallest_budget_bytes or 0
            limits = [least] if least > limit else []
            continue
        moving = MovedBase(graph, with_in_place(graph, base.program), device)
        if moving.floor_bytes > budget_bytes:
            enough.append(moving.floor_bytes)
            continue
        found = [
            (replay(graph, program, device), number, program)
            for number, program in enumerate(moving.candidates(budget_bytes, SCOUTS))
        ]
        _, _, program = min(
            (line for line in found if line[0].peak_bytes <= budget_bytes),
            key=lambda line: line[0].time_s,
        )
        violation, figures = validate_and_replay(graph, program, Budget(budget_bytes), device)
        if violation is not None:
            raise InvalidProgramError(f"moving parameters gave an invalid plan: {violation}")
        return replace(
            base,
            graph=graph,
            program=program,
            budget=budget_bytes,
            chain_steps=None,
            peak_bytes=figures.peak_bytes,
            step_time_s=figures.time_s,
            host_peak_bytes=figures.host_peak_bytes,
        )
    return min(enough, default=None)
