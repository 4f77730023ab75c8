"""The order of least peak as a 0-1 program in CP-SAT (OLLA eq. 1-5 and 10-14).

Variables: C[v,t]  task v runs at step t ∈ SPAN(v), and so creates all that it writes (the paper
        has one C for each tensor, tied by eq. 5, and so none for operators without results)
    P[e,t]  edge e is preserved at step t ∈ MUL(e); 1 in PRES(e) (eq. 10-12 → `Windows`)
    peak    bytes, in units of their greatest common divisor
Constraints: P[e,t] + C[e,t] ≤ 1 (eq. 1); P[e,t] ≤ P[e,t-1] + C[e,t-1] (eq. 2) → `_preserve`
    Σ_t C[v,t] = 1 (eq. 3), and one task at each step → `__init__`
    C[v,t] ≤ P[f,t] for all that v reads (eq. 4) → `_preserve`
    Σ_e (C[e,t] + P[e,t]) S_e ≤ peak at each step (eq. 13), with what the task that runs there
        needs meanwhile → `bytes_at`
Objective: peak (eq. 14).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, gcd
from typing import Any

from memopt.models.status import Status
from memopt.passes.order.tasks import Tasks
from memopt.passes.order.windows import Windows
from memopt.solvers.running import SolverOptions, solve_with_cp_sat

MOST_VARIABLES = 500_000
"""Larger programs are not made: they take minutes and gigabytes before the solver begins."""


@dataclass(frozen=True, slots=True)
class LifetimeAnswer:
    """What CP-SAT found.

    Attributes:
        status: OPTIMAL where no order is better, or its peak is at most what was enough.
        order: the best order; empty: none was found.
        bound: on every order's peak, bytes.
        effort: CP-SAT's deterministic time spent.
    """

    status: Status
    order: tuple[int, ...]
    bound: int
    effort: float


class LifetimeModel:
    """The variables and rows of eq. 1 to 5 for an ordering problem, with a valid order as hint."""

    def __init__(self, tasks: Tasks, start: Sequence[int], extents: Iterable[int] = ()) -> None:
        from ortools.sat.python import cp_model

        self.model: Any = cp_model.CpModel()
        self.sum_of: Any = cp_model.LinearExpr.weighted_sum
        self.tasks, self.windows = tasks, Windows(tasks)
        sizes = [value.size for value in tasks.values]
        self.unit = gcd(*sizes, *extents, *tasks.transient) or 1
        self.at = {task: step for step, task in enumerate(start)}
        self.one = self.model.new_constant(1)
        self.C = [
            {t: self._variable(self.at[v] == t) for t in self.windows.span(v)}
            for v in range(len(tasks))
        ]
        for steps in self.C:
            self.model.add_exactly_one(steps.values())
        for t in range(len(tasks)):
            self.model.add_exactly_one(steps[t] for steps in self.C if t in steps)
        self.P = [self._preserve(index) for index in range(len(self.windows.edges))]

    def _variable(self, hint: bool) -> Any:
        """Return a new 0-1 variable with the value that it has in the order to begin from."""
        variable = self.model.new_bool_var("")
        self.model.add_hint(variable, hint)
        return variable

    def _preserve(self, index: int) -> dict[int, Any]:
        """Return an edge's P by step, with its rows of eq. 1, 2 and 4."""
        edge, model = self.windows.edges[index], self.model
        made, preserved = self.C[edge.producer], self.windows.preserved(edge)
        born = self.at[edge.producer]
        last = max((self.at[x] for x in edge.consumers), default=0)
        gone = len(self.tasks) if edge.kept else last
        P = {
            t: self.one if t in preserved else self._variable(born < t <= gone)
            for t in self.windows.useful(edge)
        }
        for t, variable in P.items():
            if t in made:
                model.add_at_most_one(variable, made[t])
            before = [steps[t - 1] for steps in (P, made) if t - 1 in steps]
            model.add_bool_or(~variable, *before)
        for reader in edge.consumers:
            for t, variable in self.C[reader].items():
                model.add_implication(variable, P[t])
        if edge.kept:
            last = len(self.tasks) - 1
            model.add_bool_or(steps[last] for steps in (P, made) if last in steps)
        return P

    def live(self, index: int, t: int) -> list[Any]:
        """Return the variables of which one is 1 where a value is in memory at a step."""
        made = self.C[self.windows.edges[index].producer]
        return [steps[t] for steps in (made, self.P[index]) if t in steps]

    def bytes_at(self, t: int, counted: Collection[int], transient: Sequence[int]) -> Any:
        """Return the memory of some values and of running tasks at a step, in units (the left side
        of eq. 13)."""
        sizes = [(transient[v], steps[t]) for v, steps in enumerate(self.C) if t in steps]
        for index in counted:
            sizes += [(self.tasks.values[index].size, x) for x in self.live(index, t)]
        found = [(x, size // self.unit) for size, x in sizes if size]
        return self.sum_of([x for x, _ in found], [size for _, size in found])

    def order_of(self, solver: Any) -> tuple[int, ...]:
        """Read the order of a solution (Function 1)."""
        steps = [next(t for t, x in row.items() if solver.value(x)) for row in self.C]
        return tuple(sorted(range(len(self.tasks)), key=steps.__getitem__))


def variables(tasks: Tasks) -> int:
    """Return the number of 0-1 variables of a problem's program."""
    windows = Windows(tasks)
    created = sum(len(windows.span(task)) for task in range(len(tasks)))
    return created + sum(len(windows.useful(edge)) for edge in windows.edges)


def solve_lifetimes(
    tasks: Tasks,
    start: Sequence[int],
    least: int,
    options: SolverOptions,
    watch: Callable[[float, float], None] | None = None,
) -> LifetimeAnswer:
    """Order tasks by OLLA's eq. 14.

    Args:
        tasks: the problem.
        start: the order to begin from; no worse one is looked for.
        least: bytes; an order of at most this peak ends the search.
        options: limits of the solver, which is CP-SAT.
        watch: called with (peak, bound), in bytes, when one of them has improved.
    """
    program = LifetimeModel(tasks, start)
    most = (tasks.peak(start) - tasks.base) // program.unit
    least = min(max(0, (least - tasks.base) // program.unit), most)
    peak = program.model.new_int_var(least, most, "peak")
    for t in range(len(tasks)):
        everything = program.bytes_at(t, range(len(tasks.values)), tasks.transient)
        program.model.add(everything <= peak)
    program.model.minimize(peak)

    def bytes_of(units: float) -> float:
        return tasks.base + units * program.unit

    def improved(peak: float, bound: float) -> None:
        if watch is not None:
            watch(bytes_of(peak), bytes_of(bound))

    options = replace(options, linearize=False)
    status, solver = solve_with_cp_sat(program.model, options, watch=improved)
    order = program.order_of(solver) if status in (Status.OPTIMAL, Status.FEASIBLE) else ()
    units = ceil(solver.best_objective_bound - 1e-6)
    # The model's own least value proves nothing.
    bound = tasks.base + units * program.unit if units > least else tasks.base
    return LifetimeAnswer(status, order, bound, solver.deterministic_time)
