"""0-1 programs in HiGHS or SCIP, through OR-Tools' MathOpt: faster than CP-SAT where the linear
relaxation is strong."""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING, Any

from memopt.strategies.base import Progress, Status
from memopt.strategies.monet.waiting import waited

if TYPE_CHECKING:
    from memopt.strategies.monet.backend import Answer, Model, Solver

SCALE = 1000.0
"""Costs and bytes are scaled to sums of about so much: the solvers' tolerances are absolute."""


def solve_linear(
    program: Model,
    limit_bytes: int,
    least_peak: bool,
    solver: Solver,
    time_limit_s: float | None,
    progress: Progress | None,
    seed: int,
    gap: float,
) -> Answer:
    """`Model.solve` by a solver of mixed integer linear programs; rows that only hold where a
    variable does get the largest excess as that variable's coefficient.

    The time limit counts from here, building the model included. These solvers have no way out
    but that limit: a caller who interrupts gets no answer of theirs (see `waiting`).
    """
    from ortools.math_opt.python import mathopt

    from memopt.strategies.monet.backend import Answer

    begin = time.monotonic()
    model, variables, scale = _built(program, limit_bytes, least_peak)
    kinds = {"highs": mathopt.SolverType.HIGHS, "scip": mathopt.SolverType.GSCIP}
    spent_s = time.monotonic() - begin
    seconds = None if time_limit_s is None else max(0.01, time_limit_s - spent_s)
    limit = None if seconds is None else datetime.timedelta(seconds=seconds)
    parameters = mathopt.SolveParameters(
        time_limit=limit, relative_gap_tolerance=gap, random_seed=seed
    )
    hints = {variables[v]: float(value) for v, value in program.hints.items()}
    started = mathopt.ModelSolveParameters(
        solution_hints=[mathopt.SolutionHint(variable_values=hints)] if hints else []
    )
    result = waited(
        lambda: mathopt.solve(model, kinds[solver.value], params=parameters, model_params=started),
        progress,
        lambda: f"ilp: {solver}, {time.monotonic() - begin:.0f} s",
        limit_s=seconds,
    )
    if result is None:
        return Answer(Status.UNKNOWN, (), 0.0, 0.0)
    bound = max(0.0, result.termination.objective_bounds.dual_bound) * scale
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE,):
        return Answer(Status.INFEASIBLE, (), 0.0, 0.0)
    if not result.has_primal_feasible_solution():
        return Answer(Status.UNKNOWN, (), 0.0, bound)
    found = result.variable_values()
    values = tuple(found[v] > 0.5 for v in variables)
    status = Status.OPTIMAL if reason is mathopt.TerminationReason.OPTIMAL else Status.FEASIBLE
    return Answer(status, values, result.objective_value() * scale, bound)


def _built(program: Model, limit_bytes: int, least_peak: bool) -> tuple[Any, list[Any], float]:
    """(the program in MathOpt, its variables, what an objective is multiplied by)."""
    from ortools.math_opt.python import mathopt

    model = mathopt.Model()
    variables = [model.add_binary_variable() for _ in range(program.count)]
    for index, value in program.fixed.items():
        variables[index].lower_bound = variables[index].upper_bound = float(value)
    unit = max(1, limit_bytes) / SCALE
    peak = model.add_variable(lb=0.0, ub=limit_bytes / unit)
    for row in program.rows:
        share = unit if row.memory else 1.0
        top = row.bound / share
        constraint = model.add_linear_constraint(ub=top)
        terms: dict[int, float] = {}
        for coefficient, v in row.terms:
            terms[v] = terms.get(v, 0.0) + coefficient / share
        if row.when is not None:
            excess = max(0.0, program.worst(row) / share)
            terms[row.when] = terms.get(row.when, 0.0) + excess
            constraint.upper_bound = top + excess
        for v, factor in terms.items():
            constraint.set_coefficient(variables[v], factor)
        if row.memory:
            constraint.set_coefficient(peak, -1.0)
    total_s = sum(program.costs.values()) or 1.0
    scale = unit if least_peak else total_s / SCALE
    if least_peak:
        model.minimize(peak)
    else:
        model.minimize(sum(cost / scale * variables[v] for v, cost in program.costs.items()))
    return model, variables, scale
