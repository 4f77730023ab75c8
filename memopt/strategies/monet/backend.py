"""A thin layer over the solvers: 0-1 programs in CP-SAT, or in HiGHS or SCIP through OR-Tools'
MathOpt; their linear relaxation in GLOP."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from memopt.strategies.base import Progress, Status
from memopt.strategies.monet.waiting import waited

Term = tuple[int, int]
"""(coefficient, variable)."""


class Solver(StrEnum):
    """Which solver takes a 0-1 program."""

    CP_SAT = "cp-sat"
    HIGHS = "highs"
    SCIP = "scip"


@dataclass(frozen=True, slots=True)
class Row:
    """Σ terms ≤ bound, plus the peak variable if `memory`; only where `when` holds, if given."""

    terms: tuple[Term, ...]
    bound: int
    memory: bool = False
    when: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a solver found: values of the variables (empty without a solution), objective and a
    bound on it in the units of `Model.costs` (or bytes when the peak was minimised)."""

    status: Status
    values: tuple[bool, ...]
    objective: float
    bound: float


@dataclass
class Model:
    """A 0-1 program that minimises Σ costs under rows, or the peak of its memory rows."""

    costs: dict[int, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    fixed: dict[int, bool] = field(default_factory=dict)
    hints: dict[int, bool] = field(default_factory=dict)
    """Values to start from; they need not be all, nor feasible."""
    count: int = 0

    def variable(self, cost: float = 0.0) -> int:
        """A new 0-1 variable."""
        self.count += 1
        if cost:
            self.costs[self.count - 1] = cost
        return self.count - 1

    def add(self, terms: Iterable[Term], bound: int) -> None:
        """Σ terms ≤ bound."""
        self.rows.append(Row(tuple(terms), bound))

    def implies_any(self, left: int, right: Iterable[int]) -> None:
        """left ≤ Σ right."""
        self.add([(1, left), *((-1, v) for v in right)], 0)

    def exactly_one(self, variables: Sequence[int]) -> None:
        """Σ variables = 1."""
        self.add([(1, v) for v in variables], 1)
        self.add([(-1, v) for v in variables], -1)

    def memory(self, constant: int, terms: Iterable[Term], when: int | None = None) -> None:
        """constant + Σ terms ≤ peak, only where `when` holds."""
        self.rows.append(Row(tuple(t for t in terms if t[0]), -constant, True, when))

    def solve(
        self,
        limit_bytes: int | None,
        *,
        time_limit_s: float | None = None,
        deterministic_s: float | None = None,
        progress: Progress | None = None,
        workers: int = 1,
        seed: int = 0,
        solver: Solver = Solver.CP_SAT,
        gap: float = 0.0,
    ) -> Answer:
        """The least cost with a peak of at most `limit_bytes`; None: the least peak.

        Args:
            limit_bytes: bound on the peak variable, bytes.
            time_limit_s: seconds; None: no limit.
            deterministic_s: CP-SAT's deterministic time, of which one is a few seconds; ends the
                search at the same answer on any machine. None: no limit.
            progress: called now and then; KeyboardInterrupt ends the search: CP-SAT's with what it
                has, the others' with nothing.
            workers, seed: CP-SAT's threads (the others run on one), and the seed.
            solver: whose search.
            gap: relative gap at which the search may end.
        """
        highest = max((self.worst(row) for row in self.rows if row.memory), default=0)
        limit = highest if limit_bytes is None else min(highest, limit_bytes)
        if limit < 0:
            return Answer(Status.INFEASIBLE, (), 0.0, 0.0)
        if solver is not Solver.CP_SAT:
            from memopt.strategies.monet.mathopt import solve_linear

            least_peak = limit_bytes is None
            return solve_linear(self, limit, least_peak, solver, time_limit_s, progress, seed, gap)
        limits = (time_limit_s, deterministic_s)
        return self._cp_sat(limit, limit_bytes is None, limits, progress, workers, seed, gap)

    def _cp_sat(
        self,
        limit: int,
        least_peak: bool,
        limits: tuple[float | None, float | None],
        progress: Progress | None,
        workers: int,
        seed: int,
        gap: float,
    ) -> Answer:
        from ortools.sat.python import cp_model

        begin = time.monotonic()
        time_limit_s, deterministic_s = limits
        model, variables, scale = self._cp_model(limit, least_peak)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = seed
        solver.parameters.relative_gap_limit = gap
        if time_limit_s is not None:
            time_limit_s = max(0.01, time_limit_s - (time.monotonic() - begin))
            solver.parameters.max_time_in_seconds = time_limit_s
        if deterministic_s is not None:
            solver.parameters.max_deterministic_time = deterministic_s
        # The caller's thread takes Ctrl-C.
        solver.parameters.catch_sigint_signal = False
        known = {"best": float("inf"), "bound": 0.0}

        class Listener(cp_model.CpSolverSolutionCallback):
            def on_solution_callback(self) -> None:
                known["best"] = self.objective_value / scale

        def on_bound(bound: float) -> None:
            known["bound"] = bound / scale

        solver.best_bound_callback = on_bound
        code = waited(
            lambda: solver.solve(model, Listener()),
            progress,
            lambda: f"ilp: {known['best']:.6g}, bound {known['bound']:.6g}",
            limit_s=time_limit_s,
            stop=solver.stop_search,
        )
        assert code is not None
        names = {status.name: status for status in Status}
        status = names.get(solver.status_name(code), Status.UNKNOWN)
        if status not in (Status.OPTIMAL, Status.FEASIBLE):
            return Answer(status, (), 0.0, solver.best_objective_bound / scale)
        values = tuple(bool(solver.value(v)) for v in variables)
        # Costs are rounded down to the solver's whole numbers, so its bound stays one.
        cost, bound = solver.objective_value / scale, solver.best_objective_bound / scale
        return Answer(status, values, cost, bound)

    def _cp_model(self, limit: int, least_peak: bool) -> tuple[Any, list[Any], float]:
        """(the program in CP-SAT, its variables, what a cost is multiplied by)."""
        model, variables = self._started()
        peak = model.new_int_var(0, limit, "peak")
        for row in self.rows:
            left = sum(c * variables[v] for c, v in row.terms)
            constraint = model.add(left <= (row.bound + peak if row.memory else row.bound))
            if row.when is not None:
                constraint.only_enforce_if(variables[row.when])
        scale = 1.0 if least_peak else _scale(self.costs.values())
        whole = [int(cost * scale) * variables[v] for v, cost in self.costs.items()]
        model.minimize(peak if least_peak else sum(whole))
        return model, variables, scale

    def _started(self) -> tuple[Any, list[Any]]:
        """A CP-SAT model with the variables, those that are fixed, and the hints."""
        from ortools.sat.python import cp_model

        model = cp_model.CpModel()
        variables = [model.new_bool_var("") for _ in range(self.count)]
        for index, value in self.fixed.items():
            model.add(variables[index] == int(value))
        for index, value in self.hints.items():
            model.add_hint(variables[index], value)
        return model, variables

    def relax(self, limit_bytes: int, time_limit_s: float | None = None) -> tuple[float, ...]:
        """GLOP: the linear relaxation's values; () if it is infeasible or was stopped.

        Raises:
            ValueError: the program has conditional rows, which have no plain relaxation.
        """
        from ortools.linear_solver import pywraplp

        solver = pywraplp.Solver.CreateSolver("GLOP")
        if time_limit_s is not None:
            solver.SetTimeLimit(int(1000 * max(0.01, time_limit_s)))
        variables = [solver.NumVar(0.0, 1.0, "") for _ in range(self.count)]
        for index, value in self.fixed.items():
            variables[index].SetBounds(float(value), float(value))
        unit = max(1, limit_bytes)
        for row in self.rows:
            if row.when is not None:
                raise ValueError("relax: conditional rows have no linear relaxation")
            share = unit if row.memory else 1
            top = (row.bound + limit_bytes if row.memory else row.bound) / share
            constraint = solver.Constraint(-solver.infinity(), top)
            for coefficient, v in row.terms:
                constraint.SetCoefficient(variables[v], coefficient / share)
        for v, cost in self.costs.items():
            solver.Objective().SetCoefficient(variables[v], cost)
        solver.Objective().SetMinimization()
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            return ()
        return tuple(v.solution_value() for v in variables)

    def worst(self, row: Row) -> int:
        """The most that a row's left side can exceed its bound."""
        return sum(c for c, _ in row.terms if c > 0) - row.bound


def _scale(costs: Iterable[float]) -> float:
    """What turns seconds into the solver's whole numbers: 1 if they are whole already."""
    values = list(costs)
    if all(value == int(value) for value in values) and sum(values) < 2**40:
        return 1.0
    return 2.0**32 / max(sum(values), 1e-30)
