"""Placement within a capacity as a constraint satisfaction problem (OLLA eq. 6 to 8, CP-SAT).

Variables: offset A_i ∈ [0, capacity - S_i] of each buffer i.
Constraints: for each maximal live set, the address intervals [A_i, A_i + S_i) are disjoint: one
AddNoOverlap each. Eq. 6-7 say the same pair by pair with the order variables a and b.
Search: offsets by decreasing lifetime, smallest value first.
There is no objective: minimising the peak itself is much harder for the solver.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

import numpy as np

from memopt.models.status import Status
from memopt.passes.place.buffers import Ints, Layout
from memopt.solvers.running import SolverOptions, solve_with_cp_sat


def solve_capacity(
    layout: Layout,
    capacity: int,
    *,
    fixed: Mapping[int, int] | None = None,
    time_limit_s: float | None = None,
    deterministic_limit: float | None = 60.0,
    num_workers: int = 1,
    seed: int = 0,
) -> tuple[Status, Ints | None]:
    """Look for offsets with peak ≤ `capacity`.

    Args:
        layout: buffers of positive size.
        capacity: bytes.
        fixed: buffer index → offset of buffers already placed (OLLA §4.5, the pyramid).
        time_limit_s: wall clock; results may differ between runs if it strikes.
        deterministic_limit: CP-SAT's deterministic time, about seconds; None: no limit.
        num_workers: threads of the solver.
        seed: of the solver.

    Returns:
        (OPTIMAL, offsets), (INFEASIBLE, None) - proved, unless `fixed` is at fault - or
        (UNKNOWN, None).
    """
    if layout.bound > capacity:
        return Status.INFEASIBLE, None
    from ortools.sat.python import cp_model

    # Offsets of sunk placements are sums of sizes rounded to alignments: all multiples of this.
    unit = gcd(*layout.size.tolist(), *layout.alignment.tolist())
    if np.all(layout.alignment == layout.alignment[0]) and fixed is None:
        unit = gcd(*layout.size.tolist())
    model = cp_model.CpModel()
    offsets, intervals = [], []
    for index, size in enumerate(layout.size.tolist()):
        step = int(layout.alignment[index])
        offset = model.new_int_var(0, (capacity - size) // unit, f"A_{index}")
        if step > unit:
            multiple = model.new_int_var(0, capacity // step, "")
            model.add(offset == multiple * (step // unit))
        if fixed is not None and index in fixed:
            model.add(offset == fixed[index] // unit)
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
    options = SolverOptions(
        time_limit_s=time_limit_s,
        deterministic_s=deterministic_limit,
        workers=num_workers,
        seed=seed,
    )
    status, solver = solve_with_cp_sat(model, options)
    if status in (Status.OPTIMAL, Status.FEASIBLE):
        return Status.OPTIMAL, np.array([solver.value(x) * unit for x in offsets], dtype=np.int64)
    return status, None
