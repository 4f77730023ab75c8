"""0-1 programs in HiGHS or SCIP, through OR-Tools' MathOpt: faster than CP-SAT where the linear
relaxation is strong."""

from __future__ import annotations

import datetime
import time
from typing import Any

from memopt.strategies.base import Status
from memopt.strategies.monet.binary_program import Answer, BinaryProgram, SolverOptions
from memopt.strategies.monet.solver_thread import call_in_thread

SCALE = 1000.0
"""Costs and bytes are scaled to sums of about so much: the solvers' tolerances are absolute."""


def solve_with_mathopt(
    program: BinaryProgram, limit_bytes: int, least_peak: bool, options: SolverOptions
) -> Answer:
    """Solve a program as a mixed integer linear one; rows that only hold where a variable does get
    their largest excess as that variable's coefficient.

    The time limit counts from here, building the model included. These solvers have no way out
    but that limit: a caller who interrupts gets no answer of theirs (see `solver_thread`).
    """
    from ortools.math_opt.python import mathopt

    begin = time.monotonic()
    model, variables, scale = _built(program, limit_bytes, least_peak)
    kinds = {"highs": mathopt.SolverType.HIGHS, "scip": mathopt.SolverType.GSCIP}
    spent_s, seconds = time.monotonic() - begin, options.time_limit_s
    seconds = None if seconds is None else max(0.01, seconds - spent_s)
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
    result = call_in_thread(
        lambda: mathopt.solve(model, kinds[solver.value], params=parameters, model_params=started),
        options.progress,
        lambda: f"ilp: {solver}, {time.monotonic() - begin:.0f} s",
        limit_s=seconds,
    )
    if result is None:
        return Answer(Status.UNKNOWN)
    reason = result.termination.reason
    if reason is mathopt.TerminationReason.INFEASIBLE:
        return Answer(Status.INFEASIBLE)
    bound = max(0.0, result.termination.objective_bounds.dual_bound) * scale
    if not result.has_primal_feasible_solution():
        return Answer(Status.UNKNOWN, bound=bound)
    found = result.variable_values()
    values = tuple(found[v] > 0.5 for v in variables)
    status = Status.OPTIMAL if reason is mathopt.TerminationReason.OPTIMAL else Status.FEASIBLE
    return Answer(status, values, result.objective_value() * scale, bound)


def _built(
    program: BinaryProgram, limit_bytes: int, least_peak: bool
) -> tuple[Any, list[Any], float]:
    """Give the program in MathOpt, its variables, and the factor of its objective."""
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
            excess = max(0.0, row.largest_excess / share)
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
