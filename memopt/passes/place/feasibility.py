"""Placement as a program in CP-SAT (OLLA eq. 6 to 8, and 15).

Variables: offset A_i ∈ [0, capacity - S_i] of each buffer i.
Constraints: for each maximal live set, the address intervals [A_i, A_i + S_i) are disjoint: one
AddNoOverlap each. Eq. 6-7 say the same pair by pair with the order variables a and b.
    A_i + S_i ≤ peak (eq. 8), where it is minimised
Search: offsets by decreasing lifetime, smallest value first.
Objective: none, or the peak (eq. 15), which is much harder for the solver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, gcd

import numpy as np

from memopt.models.status import Status
from memopt.passes.place.buffers import Ints, Layout
from memopt.solvers.running import SolverOptions, solve_with_cp_sat

EFFORT = SolverOptions(deterministic_s=60.0)


@dataclass(frozen=True, slots=True)
class CapacityAnswer:
    """What CP-SAT found.

    Attributes:
        status: OPTIMAL: no placement has a smaller peak, or one was enough; FEASIBLE: some
            placement; INFEASIBLE: none exists; UNKNOWN.
        offsets: of the best placement; None: none was found.
        bound: of every placement's peak, bytes.
        effort: CP-SAT's deterministic time spent.
    """

    status: Status
    offsets: Ints | None
    bound: int
    effort: float = 0.0


def solve_capacity(
    layout: Layout,
    capacity: int,
    *,
    least: int | None = None,
    options: SolverOptions = EFFORT,
    watch: Callable[[int, int], None] | None = None,
) -> CapacityAnswer:
    """Look for offsets with peak ≤ `capacity`.

    Args:
        layout: buffers of positive size.
        capacity: bytes.
        least: minimise the peak, down to this many bytes; None: the first placement is enough.
        options: limits of the solver, which is CP-SAT.
        watch: called with (peak, bound) when one of them has improved, if the peak is minimised.
    """
    if layout.bound > capacity:
        return CapacityAnswer(Status.INFEASIBLE, None, layout.bound)
    from ortools.sat.python import cp_model

    model, unit = cp_model.CpModel(), _unit(layout)
    offsets, intervals = [], []
    for index, size in enumerate(layout.size.tolist()):
        step = int(layout.alignment[index])
        offset = model.new_int_var(0, (capacity - size) // unit, f"A_{index}")
        if step > unit:
            multiple = model.new_int_var(0, capacity // step, "")
            model.add(offset == multiple * (step // unit))
        offsets.append(offset)
        intervals.append(model.new_fixed_size_interval_var(offset, size // unit, f"S_{index}"))
    start, members = layout.members
    for section in range(layout.sections):
        inside = members[start[section] : start[section + 1]]
        model.add_no_overlap([intervals[index] for index in inside])
    longest_first = np.argsort(layout.lower - layout.upper, kind="stable")
    model.add_decision_strategy(
        [offsets[index] for index in longest_first],
        cp_model.CHOOSE_FIRST,
        cp_model.SELECT_MIN_VALUE,
    )
    bottom = 0
    if least is not None:
        bottom = min(max(layout.bound, least), capacity) // unit
        peak = model.new_int_var(bottom, capacity // unit, "peak")
        for offset, size in zip(offsets, layout.size.tolist(), strict=True):
            model.add(offset + size // unit <= peak)
        model.minimize(peak)

    def improved(peak: float, bound: float) -> None:
        if watch is not None and least is not None:
            watch(int(peak) * unit, int(bound) * unit)

    status, solver = solve_with_cp_sat(model, options, watch=improved)
    effort = solver.deterministic_time
    if status is Status.INFEASIBLE:
        return CapacityAnswer(status, None, (capacity // unit + 1) * unit, effort)
    proved = ceil(solver.best_objective_bound - 1e-6) if least is not None else 0
    bound = proved * unit if proved > bottom else layout.bound
    if status not in (Status.OPTIMAL, Status.FEASIBLE):
        return CapacityAnswer(status, None, bound, effort)
    placed = np.array([solver.value(x) * unit for x in offsets], dtype=np.int64)
    return CapacityAnswer(status, placed, bound, effort)


def _unit(layout: Layout) -> int:
    """Return the common divisor of the offsets of sunk placements, which are sums of sizes rounded
    to alignments."""
    if np.all(layout.alignment == layout.alignment[0]):
        return gcd(*layout.size.tolist())
    return gcd(*layout.size.tolist(), *layout.alignment.tolist())
