"""0-1 programs: their variables, costs and rows, and their solvers.

The solvers are CP-SAT; HiGHS and SCIP through OR-Tools' MathOpt, faster where the linear relaxation
is strong; and GLOP for that relaxation itself.
"""

from __future__ import annotations

import datetime
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memopt.models.status import Status
from memopt.solvers.running import (
    Solver,
    SolverOptions,
    call_in_thread,
    solve_with_cp_sat,
)

_LOG = logging.getLogger(__name__)

SCALE = 1000.0
"""Costs and bytes are scaled so that their sum is about this: solvers' tolerances are absolute."""
LARGEST = 1e9
"""Larger figures of a scaled row count as this, which loses no solution: HiGHS refuses 1e15."""
LEAST_COST = 1e-298
"""Smaller sums of costs count as equal: their factor to whole numbers would be infinite."""
GAP_TOLERANCE, COST_TOLERANCE = 2e-6, 1e-7
"""The most by which a bound of HiGHS or SCIP on scaled costs may be too high: once per solve, since
they skip small improvements; and for each variable, whose reduced cost counts as 0."""

Term = tuple[float, int]
"""(coefficient, variable); whole coefficients for CP-SAT."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Require Σ terms ≤ bound, plus the peak variable if `memory`; only where `when`, if given,
    holds."""

    terms: tuple[Term, ...]
    bound: float
    memory: bool = False
    when: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A solver's result: values of the variables (empty without a solution), the objective, and a
    bound on it, in units of the costs (bytes when the peak was minimised)."""

    status: Status
    values: tuple[bool, ...] = ()
    objective: float = 0.0
    bound: float = 0.0


@dataclass
class BinaryProgram:
    """A 0-1 program that minimises Σ costs under rows, or the peak of its memory rows."""

    costs: dict[int, float] = field(default_factory=dict)
    rows: list[Constraint] = field(default_factory=list)
    fixed: dict[int, bool] = field(default_factory=dict)
    hints: dict[int, bool] = field(default_factory=dict)
    """Values to start from; they may be partial, and infeasible."""
    amounts: set[int] = field(default_factory=set)
    """Continuous variables from 0 on, which CP-SAT cannot solve."""
    most: dict[int, int] = field(default_factory=dict)
    """Integer variables and their upper bounds, in place of 1; CP-SAT cannot solve them."""
    count: int = 0

    def amount(self, cost: float = 0.0) -> int:
        """Add a continuous variable of at least 0. Memory rows cannot contain it."""
        added = self.variable(cost)
        self.amounts.add(added)
        return added

    def variable(self, cost: float = 0.0) -> int:
        """Add a 0-1 variable."""
        self.count += 1
        if cost:
            self.costs[self.count - 1] = cost
        return self.count - 1

    def add(self, terms: Iterable[Term], bound: float) -> None:
        """Require Σ terms ≤ bound."""
        self.rows.append(Constraint(tuple(terms), bound))

    def at_most_one(self, variables: Iterable[int]) -> None:
        """Require Σ variables ≤ 1."""
        self.add([(1, v) for v in variables], 1)

    def at_least_one(self, variables: Iterable[int]) -> None:
        """Require Σ variables ≥ 1."""
        self.add([(-1, v) for v in variables], -1)

    def exactly_one(self, variables: Sequence[int]) -> None:
        """Require Σ variables = 1."""
        self.at_most_one(variables)
        self.at_least_one(variables)

    def implies_any(self, left: int, right: Iterable[int]) -> None:
        """Require left ≤ Σ right."""
        self.add([(1, left), *((-1, v) for v in right)], 0)

    def memory(self, constant: int, terms: Iterable[Term], when: int | None = None) -> None:
        """Require constant + Σ terms ≤ peak, only where `when` holds."""
        self.rows.append(Constraint(tuple(t for t in terms if t[0]), -constant, True, when))

    def largest_excess(self, row: Constraint) -> float:
        """Return the most by which the left side of a memory row can exceed its bound."""
        return sum(c * self.most.get(v, 1) for c, v in row.terms if c > 0) - row.bound

    def solve(self, limit_bytes: int | None = None, options: SolverOptions | None = None) -> Answer:
        """Minimise the cost with a peak of at most `limit_bytes`; None: minimise the peak."""
        options = options or SolverOptions()
        least_peak = limit_bytes is None
        limit = int(max((self.largest_excess(row) for row in self.rows if row.memory), default=0))
        limit = limit if limit_bytes is None else min(limit, limit_bytes)
        if limit < 0:
            return Answer(Status.INFEASIBLE)
        if options.solver is not Solver.CP_SAT:
            return solve_with_mathopt(self, limit, least_peak, options)
        if self.amounts or self.most:
            raise ValueError("a program with other than 0-1 variables needs HiGHS or SCIP")
        return self._solve_with_cp_sat(limit, least_peak, options)

    def _solve_with_cp_sat(self, limit: int, least_peak: bool, options: SolverOptions) -> Answer:
        begin, left_s = time.monotonic(), options.time_limit_s
        model, variables, scale = self._cp_sat_model(limit, least_peak)
        if left_s is not None:
            left_s = max(0.01, left_s - (time.monotonic() - begin))
        status, solver = solve_with_cp_sat(
            model, replace(options, time_limit_s=left_s), scale=scale
        )
        # Costs are rounded down to the solver's whole numbers, so its bound stays a bound.
        bound = solver.best_objective_bound / scale
        if status not in (Status.OPTIMAL, Status.FEASIBLE):
            return Answer(status, bound=bound)
        values = tuple(bool(solver.value(v)) for v in variables)
        return Answer(status, values, solver.objective_value / scale, bound)

    def _cp_sat_model(self, limit: int, least_peak: bool) -> tuple[Any, list[Any], float]:
        """Return the program in CP-SAT, its variables, and the factor of its costs."""
        from ortools.sat.python import cp_model

        model = cp_model.CpModel()
        variables = [model.new_bool_var("") for _ in range(self.count)]
        for index, value in self.fixed.items():
            model.add(variables[index] == int(value))
        for index, value in self.hints.items():
            model.add_hint(variables[index], value)
        peak = model.new_int_var(0, limit, "peak")
        for row in self.rows:
            left = sum(c * variables[v] for c, v in row.terms)
            constraint = model.add(left <= (row.bound + peak if row.memory else row.bound))
            if row.when is not None:
                constraint.only_enforce_if(variables[row.when])
        scale = 1.0 if least_peak else whole_number_scale(self.costs.values())
        whole = [int(cost * scale) * variables[v] for v, cost in self.costs.items()]
        model.minimize(peak if least_peak else sum(whole))
        return model, variables, scale

    def relax(self, limit_bytes: int, time_limit_s: float | None = None) -> tuple[float, ...]:
        """Solve the linear relaxation with GLOP; () if it is infeasible or the search was stopped.

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


def whole_number_scale(costs: Iterable[float]) -> float:
    """Return the factor from seconds to whole numbers: 1 if they are whole already."""
    values = list(costs)
    if all(value == int(value) for value in values) and sum(values) < 2**40:
        return 1.0
    return 2.0**32 / max(sum(values), LEAST_COST)


def solve_with_mathopt(
    program: BinaryProgram, limit_bytes: int, least_peak: bool, options: SolverOptions
) -> Answer:
    """Solve a program as a mixed integer linear one; a row that holds only where a variable does
    gets its largest excess as that variable's coefficient (big M).

    The time limit counts from here, building the model included. Only that limit stops these
    solvers: a caller who interrupts gets no answer from them (see `call_in_thread`).
    """
    from ortools.math_opt.python import mathopt

    begin = time.monotonic()
    model, variables, scale = _built(program, limit_bytes, least_peak)
    kinds = {"highs": mathopt.SolverType.HIGHS, "scip": mathopt.SolverType.GSCIP}
    spent_s, seconds = time.monotonic() - begin, options.time_limit_s
    # A timedelta holds no larger numbers.
    seconds = None if seconds is None else min(max(0.01, seconds - spent_s), 1e9)
    parameters = mathopt.SolveParameters(
        time_limit=None if seconds is None else datetime.timedelta(seconds=seconds),
        relative_gap_tolerance=options.gap,
        random_seed=options.seed,
    )
    hints = {variables[v]: float(value) for v, value in program.hints.items()}
    started = mathopt.ModelSolveParameters(
        solution_hints=[mathopt.SolutionHint(variable_values=hints)] if hints else []
    )
    solver = options.solver

    def solved() -> Any:
        try:
            return mathopt.solve(
                model, kinds[solver.value], params=parameters, model_params=started
            )
        except (RuntimeError, AttributeError) as error:
            # OR-Tools asks the solver's own error, then the context, for a code that it lacks.
            cause = error.__context__ if isinstance(error, AttributeError) else error
            if cause is None:
                raise
            _LOG.warning("%s refuses the program, so there is no answer of it: %s", solver, cause)
            return None

    result = call_in_thread(
        solved,
        options.progress,
        lambda: f"ilp: {solver}, {time.monotonic() - begin:.0f} s",
        limit_s=seconds,
    )
    if result is None:
        return Answer(Status.UNKNOWN)
    reason = result.termination.reason
    if reason is mathopt.TerminationReason.INFEASIBLE:
        return Answer(Status.INFEASIBLE)
    # Widened by the solvers' tolerances.
    slack = GAP_TOLERANCE + COST_TOLERANCE * program.count
    bound = max(0.0, result.termination.objective_bounds.dual_bound - slack) * scale
    if not least_peak and _is_whole(program):
        bound = float(math.ceil(bound))
    if not result.has_primal_feasible_solution():
        return Answer(Status.UNKNOWN, bound=bound)
    found = result.variable_values()
    values = tuple(found[v] > 0.5 for v in variables)
    status = Status.OPTIMAL if reason is mathopt.TerminationReason.OPTIMAL else Status.FEASIBLE
    return Answer(status, values, result.objective_value() * scale, bound)


def _is_whole(program: BinaryProgram) -> bool:
    """Tell whether every cost that a solution can have is a whole number."""
    costs = program.costs.items()
    return all(v not in program.amounts and float(cost).is_integer() for v, cost in costs)


def _most(program: BinaryProgram, v: int) -> float:
    return math.inf if v in program.amounts else program.most.get(v, 1)


def _built(
    program: BinaryProgram, limit_bytes: int, least_peak: bool
) -> tuple[Any, list[Any], float]:
    """Return the program in MathOpt, its variables, and the factor of its objective."""
    from ortools.math_opt.python import mathopt

    model = mathopt.Model()
    variables = [
        model.add_variable(
            lb=0.0,
            ub=_most(program, v),
            is_integer=v not in program.amounts,
        )
        for v in range(program.count)
    ]
    for index, value in program.fixed.items():
        only = float(value) * program.most.get(index, 1)
        variables[index].lower_bound = variables[index].upper_bound = only
    unit = max(1, limit_bytes) / SCALE
    peak = model.add_variable(lb=0.0, ub=limit_bytes / unit)
    for row in program.rows:
        share = unit if row.memory else 1.0
        top = max(-LARGEST, row.bound / share)
        constraint = model.add_linear_constraint(ub=top)
        terms: dict[int, float] = {}
        for coefficient, v in row.terms:
            terms[v] = terms.get(v, 0.0) + min(LARGEST, coefficient / share)
        high = sum(f * _most(program, v) for v, f in terms.items() if f > 0)
        excess = max(0.0, high - top)
        for v, factor in terms.items():
            if v not in program.amounts:
                # By one variable that holds the row, whatever the others are.
                terms[v] = max(factor, -max(LARGEST, excess))
        if row.when is not None:
            terms[row.when] = terms.get(row.when, 0.0) + excess
            constraint.upper_bound = top + excess
        for v, factor in terms.items():
            constraint.set_coefficient(variables[v], factor)
        if row.memory:
            constraint.set_coefficient(peak, -1.0)
    total_s = sum(program.costs.values()) or 1.0
    scale = unit if least_peak else max(total_s, LEAST_COST) / SCALE
    if least_peak:
        model.minimize(peak)
    else:
        model.minimize(sum(cost / scale * variables[v] for v, cost in program.costs.items()))
    return model, variables, scale
