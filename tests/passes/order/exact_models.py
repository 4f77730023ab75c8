"""The paper's two programs as CP-SAT models, for small graphs: order alone and order with place.

Variables: p_t ∈ [ancestors, n-1-descendants], the position of task t (OLLA eq. 10, with the
    numbers of ancestors and descendants instead of distances) → `_positions`
    e_v, the end of value v: after its last consumer, or n if it is kept → `_lifetimes`
    A_v, the address of value v (joint program only) → `solve_joint`
Constraints: all p_t differ (one task per step; eq. 1-3, 5); p_t < p_u where t precedes u (eq. 4)
    the values live at a step, and its transient bytes, sum to at most the peak (eq. 13): one
    AddCumulative → `solve_order`
    lifetimes × address ranges do not overlap (eq. 6, 7): one AddNoOverlap2D → `solve_joint`
    A_v + S_v ≤ peak (eq. 8)
Objective: the peak (eq. 14, eq. 9).

Transient bytes are a value that lives for one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from memopt.models.status import Status
from memopt.passes.order.tasks import Tasks


@dataclass(frozen=True, slots=True)
class ExactResult:
    """What a model found: status, order, addresses of the values and then of the tasks' transient
    bytes (joint program), peak and bound in bytes, base included. Without a solution the order
    is empty and the peak None."""

    status: Status
    order: tuple[int, ...]
    addresses: tuple[int, ...] | None
    peak: int | None
    bound: int


class _Model:
    """What both programs share."""

    def __init__(self, tasks: Tasks) -> None:
        from ortools.sat.python import cp_model

        self.cp_model = cp_model
        self.tasks = tasks
        self.model: Any = cp_model.CpModel()
        sizes = [*(value.size for value in tasks.values), *tasks.transient]
        self.unit = gcd(*sizes) or 1
        self.sizes = [size // self.unit for size in sizes]
        self.positions = self._positions()
        self.ends = self._lifetimes()
        self.peak = self.model.new_int_var(0, sum(self.sizes), "peak")
        self.model.minimize(self.peak)

    def _positions(self) -> list[Any]:
        tasks, model = self.tasks, self.model
        last = len(tasks) - 1
        positions = [
            model.new_int_var(
                tasks.ancestors[t].bit_count(), last - tasks.descendants[t].bit_count(), f"p_{t}"
            )
            for t in range(len(tasks))
        ]
        model.add_all_different(positions)
        for task, earlier in enumerate(tasks.before):
            for other in earlier:
                model.add(positions[other] < positions[task])
        return positions

    def _lifetimes(self) -> list[Any]:
        """The interval in time of every value, then of every task's transient bytes."""
        model, count = self.model, len(self.tasks)
        intervals = []
        for index, value in enumerate(self.tasks.values):
            start = self.positions[value.producer]
            end: Any = count
            if not value.kept:
                end = model.new_int_var(1, count, f"e_{index}")
                model.add_max_equality(
                    end,
                    [self.positions[c] + 1 for c in (*value.consumers, value.producer)],
                )
            length = model.new_int_var(1, count, "")
            intervals.append(model.new_interval_var(start, length, end, f"live_{index}"))
        for task in range(count):
            intervals.append(model.new_fixed_size_interval_var(self.positions[task], 1, ""))
        return intervals

    def hint(self, order: Sequence[int]) -> None:
        """Start from a known order."""
        for position, task in enumerate(order):
            self.model.add_hint(self.positions[task], position)

    def solve(
        self,
        addresses: Sequence[Any] | None,
        time_limit_s: float | None,
        deterministic_limit: float | None,
        num_workers: int,
        seed: int,
    ) -> ExactResult:
        """Run the solver and read the result."""
        solver = self.cp_model.CpSolver()
        solver.parameters.num_workers = num_workers
        solver.parameters.random_seed = seed
        if time_limit_s is not None:
            solver.parameters.max_time_in_seconds = max(time_limit_s, 0.0)
        if deterministic_limit is not None:
            solver.parameters.max_deterministic_time = deterministic_limit
        outcome = solver.solve(self.model)
        base = self.tasks.base
        bound = base
        if outcome == self.cp_model.UNKNOWN:
            return ExactResult(Status.UNKNOWN, (), None, None, bound)
        if outcome not in (self.cp_model.OPTIMAL, self.cp_model.FEASIBLE):
            raise RuntimeError(f"CP-SAT rejects the model: {solver.status_name(outcome)}")
        bound = base + round(solver.best_objective_bound) * self.unit
        order = sorted(
            range(len(self.tasks)), key=lambda task: int(solver.value(self.positions[task]))
        )
        placed = None
        if addresses is not None:
            placed = tuple(int(solver.value(address)) * self.unit for address in addresses)
        return ExactResult(
            Status.OPTIMAL if outcome == self.cp_model.OPTIMAL else Status.FEASIBLE,
            tuple(order),
            placed,
            base + int(solver.value(self.peak)) * self.unit,
            bound,
        )


def solve_order(
    tasks: Tasks,
    *,
    hint: Sequence[int] = (),
    time_limit_s: float | None = None,
    deterministic_limit: float | None = 60.0,
    num_workers: int = 1,
    seed: int = 0,
) -> ExactResult:
    """OLLA eq. 14: the order of least peak. Practical up to some dozens of tasks.

    Args:
        tasks: the ordering problem.
        hint: an order to start from.
        time_limit_s: wall clock; results may differ between runs if it strikes.
        deterministic_limit: CP-SAT's deterministic time; None: no limit.
        num_workers: threads of the solver.
        seed: of the solver.
    """
    program = _Model(tasks)
    program.model.add_cumulative(program.ends, program.sizes, program.peak)
    program.hint(hint)
    return program.solve(None, time_limit_s, deterministic_limit, num_workers, seed)


def solve_joint(
    tasks: Tasks,
    *,
    hint: Sequence[int] = (),
    time_limit_s: float | None = None,
    deterministic_limit: float | None = 60.0,
    num_workers: int = 1,
    seed: int = 0,
) -> ExactResult:
    """OLLA eq. 9: order and addresses together. Practical up to a dozen tasks.

    Arguments as in `solve_order`. Transient bytes have an address, too.
    """
    program = _Model(tasks)
    addresses, rectangles, times = [], [], []
    for size, interval in zip(program.sizes, program.ends, strict=True):
        address = program.model.new_int_var(0, sum(program.sizes), "A")
        addresses.append(address)
        program.model.add(address + size <= program.peak)
        if size > 0:
            rectangles.append(program.model.new_fixed_size_interval_var(address, size, ""))
            times.append(interval)
    program.model.add_no_overlap_2d(times, rectangles)
    program.model.add_cumulative(program.ends, program.sizes, program.peak)
    program.hint(hint)
    return program.solve(addresses, time_limit_s, deterministic_limit, num_workers, seed)
