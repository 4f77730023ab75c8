"""The solvers of 0-1 programs: CP-SAT, or HiGHS and SCIP through OR-Tools' MathOpt; GLOP for the
linear relaxation."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from memopt.strategies.base import Status
from memopt.strategies.monet.binary_program import Answer, BinaryProgram, Solver, SolverOptions
from memopt.strategies.monet.mathopt import solve_with_mathopt
from memopt.strategies.monet.solver_thread import call_in_thread


@dataclass
class Model(BinaryProgram):
    """A 0-1 program that can be solved."""

    def solve(self, limit_bytes: int | None = None, options: SolverOptions | None = None) -> Answer:
        """Minimise the cost with a peak of at most `limit_bytes`; None: minimise the peak."""
        options = options or SolverOptions()
        least_peak = limit_bytes is None
        limit = max((row.largest_excess for row in self.rows if row.memory), default=0)
        limit = limit if limit_bytes is None else min(limit, limit_bytes)
        if limit < 0:
            return Answer(Status.INFEASIBLE)
        if options.solver is not Solver.CP_SAT:
            return solve_with_mathopt(self, limit, least_peak, options)
        return self._solve_with_cp_sat(limit, least_peak, options)

    def _solve_with_cp_sat(self, limit: int, least_peak: bool, options: SolverOptions) -> Answer:
        begin, left_s = time.monotonic(), options.time_limit_s
        model, variables, scale = self._cp_sat_model(limit, least_peak)
        if left_s is not None:
            left_s = max(0.01, left_s - (time.monotonic() - begin))
        status, solver = solve_with_cp_sat(model, scale, replace(options, time_limit_s=left_s))
        # Costs are rounded down to the solver's whole numbers, so its bound stays one.
        bound = solver.best_objective_bound / scale
        if status not in (Status.OPTIMAL, Status.FEASIBLE):
            return Answer(status, bound=bound)
        values = tuple(bool(solver.value(v)) for v in variables)
        return Answer(status, values, solver.objective_value / scale, bound)

    def _cp_sat_model(self, limit: int, least_peak: bool) -> tuple[Any, list[Any], float]:
        """Give the program in CP-SAT, its variables, and the factor of its costs."""
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


def solve_with_cp_sat(model: Any, scale: float, options: SolverOptions) -> tuple[Status, Any]:
    """Solve a CP-SAT model.

    Args:
        model: with its objective.
        scale: the factor of the objective's costs.
        options: the solver is CP-SAT.

    Returns:
        The status, and the solver, which knows the values and the bound.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = options.workers
    solver.parameters.random_seed = options.seed
    solver.parameters.relative_gap_limit = options.gap
    if options.time_limit_s is not None:
        solver.parameters.max_time_in_seconds = options.time_limit_s
    if options.deterministic_s is not None:
        solver.parameters.max_deterministic_time = options.deterministic_s
    # The caller's thread takes Ctrl-C.
    solver.parameters.catch_sigint_signal = False
    known = {"best": float("inf"), "bound": 0.0}

    class Listener(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            known["best"] = self.objective_value / scale

    def on_bound(bound: float) -> None:
        known["bound"] = bound / scale

    solver.best_bound_callback = on_bound
    code = call_in_thread(
        lambda: solver.solve(model, Listener()),
        options.progress,
        lambda: f"ilp: {known['best']:.6g}, bound {known['bound']:.6g}",
        limit_s=options.time_limit_s,
        stop=solver.stop_search,
    )
    assert code is not None
    names = {status.name: status for status in Status}
    return names.get(solver.status_name(code), Status.UNKNOWN), solver


def whole_number_scale(costs: Iterable[float]) -> float:
    """Give the factor from seconds to whole numbers: 1 if they are whole already."""
    values = list(costs)
    if all(value == int(value) for value in values) and sum(values) < 2**40:
        return 1.0
    return 2.0**32 / max(sum(values), 1e-30)
