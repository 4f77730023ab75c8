"""The integral problem as a constraint model (Offloading Problem 1).

Variables: start s_k of every operation, and for every movable x_j whether it is offloaded (o_j),
when its copy out begins (a_j), when its device copy is free (e_j), when its copy back begins
(b_j). Times are whole ticks.

  operations in order                     s_{k+1} ≥ s_k + d_k                     → operations
  data exist; return before B_j           a_j ≥ end F_{j-1}, b_j + r_j ≤ s(B_j)   → transfers
  free once copied and read by F_j        e_j ≥ a_j + t_j, e_j ≥ end F_j, b_j ≥ e_j
  one transfer at a time (B), or one per direction                                → links
  memory at every time ≤ M (E)                                                    → memory
  host memory at every time                                                       → host
  what is away when an operation runs     z_{j,k} ⇒ e_j ≤ τ_k ≤ b_j               → room
  makes its room                          Σ_j |x_j|·z_{j,k} ≥ need_k
  and crosses the link before and after   τ_k ≥ Σ_j t_j·z_{j,k}

`room` is implied by `memory` (τ_k is the start of F_i, the end of B_i; what is away may change
in between); it is what gives the solver good bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from memopt.models.status import Status
from memopt.solvers.running import SolverOptions, solve_with_cp_sat
from memopt.strategies.offload.ordered import ordered_schedule
from memopt.strategies.offload.problem import Bytes, OffloadProblem

LARGEST_DENOMINATOR = 10**4
LARGEST_HORIZON = 10**7


@dataclass(frozen=True)
class Ticks:
    """Durations in ticks, rounded up where they are no multiples of one.

    Attributes:
        tick_s: length of a tick, seconds.
        durations: of the 2n operations.
        out: of the copy of each x_j to the host.
        back: of each copy back.
        exact: whether nothing was rounded.
    """

    tick_s: float
    durations: tuple[int, ...]
    out: tuple[int, ...]
    back: tuple[int, ...]
    exact: bool

    def up(self, time_s: float) -> int:
        """Return the first tick not before a time."""
        return _ceil(time_s / self.tick_s)

    def lower_s(self, ticks: int, events: int) -> float:
        """Convert a lower bound in ticks to seconds. Each of the at most `events` durations on a
        path may have been rounded up by one tick."""
        return (ticks if self.exact else ticks - events) * self.tick_s


def choose_ticks(problem: OffloadProblem, horizon_s: float, resolution: int) -> Ticks:
    """Choose ticks in which all times are whole, if they are few; else horizon/resolution."""
    operations = problem.durations_s.tolist()
    out = [problem.latency_s + x / problem.to_host_bytes_per_s for x in problem.sizes.tolist()]
    back = [problem.latency_s + x / problem.from_host_bytes_per_s for x in problem.sizes.tolist()]
    common = _common_tick([*operations, *out, *back])
    exact = common is not None and horizon_s / common <= LARGEST_HORIZON
    tick_s = common if exact and common is not None else max(horizon_s, 1e-12) / resolution
    return Ticks(
        tick_s,
        tuple(_ceil(x / tick_s) for x in operations),
        tuple(_ceil(x / tick_s) for x in out),
        tuple(_ceil(x / tick_s) for x in back),
        exact,
    )


def _common_tick(times_s: list[float]) -> float | None:
    """Return the largest time of which all are multiples; None if they are no small fractions."""
    fractions = [Fraction(time_s).limit_denominator(LARGEST_DENOMINATOR) for time_s in times_s]
    for fraction, time_s in zip(fractions, times_s, strict=True):
        if abs(float(fraction) - time_s) > 1e-12 * max(1.0, time_s):
            return None
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    if denominator > 10**9:
        return None
    numerator = math.gcd(*(int(fraction * denominator) for fraction in fractions))
    return numerator / denominator if numerator else None


def _ceil(value: float) -> int:
    """Round up, but keep a value that is whole up to rounding errors."""
    return math.ceil(value - 1e-6)


@dataclass(frozen=True)
class ExactSolution:
    """The solver's result.

    Attributes:
        out: offloaded indices in the order of their copies to the host.
        back: the same indices in the order of their return.
        time_s: makespan in rounded-up ticks; an upper bound on the real one.
        lower_bound_s: no schedule is faster.
        proved: whether the solver closed its gap.
    """

    out: tuple[int, ...]
    back: tuple[int, ...]
    time_s: float
    lower_bound_s: float
    proved: bool


class ExactModel:
    """The constraint model of one problem, ready to solve.

    Attributes:
        problem: chain, capacity and link.
        ticks: its times in whole ticks.
        horizon: ticks in which the step can be done.
        host_budget_bytes: the most that may be on the host at once; None: no limit.
    """

    def __init__(
        self, problem: OffloadProblem, ticks: Ticks, horizon: int, host_budget_bytes: int | None
    ) -> None:
        from ortools.sat.python import cp_model

        self.problem, self.ticks, self.horizon = problem, ticks, horizon
        self.host_budget_bytes = host_budget_bytes
        self.stages = problem.stages
        self.movable = [j for j in range(self.stages + 1) if problem.movable[j]]
        self.model: Any = cp_model.CpModel()
        self.start: list[Any] = []
        self.offloaded: dict[int, Any] = {}
        self.out_start: dict[int, Any] = {}
        self.free: dict[int, Any] = {}
        self.back_start: dict[int, Any] = {}
        self.out_intervals: list[Any] = []
        self.back_intervals: list[Any] = []
        self.operations()
        self.transfers()
        self.links()
        self.memory()
        self.host()
        self.room()
        self.model.minimize(self.end(2 * self.stages - 1))

    def end(self, k: int) -> Any:
        """Return the end of operation k."""
        return self.start[k] + self.ticks.durations[k]

    def backward(self, j: int) -> int:
        """Return the index of operation B_j."""
        return 2 * self.stages - 1 - j

    def operations(self) -> None:
        for k in range(2 * self.stages):
            self.start.append(self.model.new_int_var(0, self.horizon, f"s{k}"))
            if k:
                self.model.add(self.start[k] >= self.end(k - 1))
        self.model.add(self.end(2 * self.stages - 1) <= self.horizon)

    def transfers(self) -> None:
        model = self.model
        for j in self.movable:
            o = self.offloaded[j] = model.new_bool_var(f"o{j}")
            a = self.out_start[j] = model.new_int_var(0, self.horizon, f"a{j}")
            e = self.free[j] = model.new_int_var(0, self.horizon, f"e{j}")
            b = self.back_start[j] = model.new_int_var(0, self.horizon, f"b{j}")
            if j:
                model.add(a >= self.end(j - 1)).only_enforce_if(o)
            model.add(e >= a + self.ticks.out[j]).only_enforce_if(o)
            model.add(e >= self.end(j)).only_enforce_if(o)
            model.add(b >= e).only_enforce_if(o)
            model.add(b + self.ticks.back[j] <= self.start[self.backward(j)]).only_enforce_if(o)
            # Absent transfers have one value each, so that they are not searched.
            for variable in (a, b):
                model.add(variable == 0).only_enforce_if(o.negated())
            self.out_intervals.append(
                model.new_optional_fixed_size_interval_var(a, self.ticks.out[j], o, f"out{j}")
            )
            self.back_intervals.append(
                model.new_optional_fixed_size_interval_var(b, self.ticks.back[j], o, f"in{j}")
            )

    def links(self) -> None:
        if self.problem.device.duplex:
            self.model.add_no_overlap(self.out_intervals)
            self.model.add_no_overlap(self.back_intervals)
        else:
            self.model.add_no_overlap(self.out_intervals + self.back_intervals)

    def memory(self) -> None:
        intervals: list[Any] = []
        demands: list[int] = []

        def occupy(begin: Any, end: Any, size_bytes: int, present: Any = True) -> None:
            if size_bytes <= 0:
                return
            length = self.model.new_int_var(0, self.horizon, "")
            intervals.append(self.model.new_optional_interval_var(begin, length, end, present, ""))
            demands.append(size_bytes)

        last = 2 * self.stages - 1
        for j in range(self.stages + 1):
            size = int(self.problem.sizes[j])
            begin = self.start[j - 1] if j else 0
            end = self.end(self.backward(j - 1)) if j else self.end(last)
            if j not in self.offloaded:
                occupy(begin, end, size)
                continue
            self.model.add(self.free[j] == end).only_enforce_if(self.offloaded[j].negated())
            occupy(begin, self.free[j], size)
            occupy(self.back_start[j], end, size, self.offloaded[j])
        for k in range(last + 1):
            occupy(self.start[k], self.end(k), int(self.problem.demand_bytes[k]))
            if k:
                between = int(self.problem.between_bytes[k])
                occupy(self.end(k - 1), self.start[k], between)
        self.model.add_cumulative(intervals, demands, self.problem.capacity_bytes)

    def host(self) -> None:
        if self.host_budget_bytes is None:
            return
        intervals, demands = [], []
        for j in self.movable:
            length = self.model.new_int_var(0, self.horizon, "")
            intervals.append(
                self.model.new_optional_interval_var(
                    self.out_start[j], length, self.end(self.backward(j)), self.offloaded[j], ""
                )
            )
            demands.append(int(self.problem.sizes[j]))
        self.model.add_cumulative(intervals, demands, self.host_budget_bytes)

    def room(self) -> None:
        last = self.end(2 * self.stages - 1)
        sizes = self.problem.sizes
        for k in range(2 * self.stages):
            need = int(self.problem.need_bytes[k])
            if need <= 0:
                continue
            # Any instant of the operation will do: its start tells most in the forward phase.
            forward = k < self.stages
            instant = self.start[k] if forward else self.end(k)
            away = {
                j: self.away(j, k, instant)
                for j in self.movable
                if j < (k if forward else self.backward(k))
            }
            self.model.add(sum(int(sizes[j]) * z for j, z in away.items()) >= need)
            out = sum(self.ticks.out[j] * z for j, z in away.items())
            back = sum(self.ticks.back[j] * z for j, z in away.items())
            self.model.add(instant >= out)
            self.model.add(last >= instant + back)
        if not self.problem.device.duplex:
            moved = [
                (self.ticks.out[j] + self.ticks.back[j]) * self.offloaded[j] for j in self.movable
            ]
            self.model.add(last >= sum(moved))

    def away(self, j: int, k: int, instant: Any) -> Any:
        """Return z_{j,k}: x_j is not on the device at an instant of operation k."""
        z = self.model.new_bool_var(f"z{j}_{k}")
        self.model.add_implication(z, self.offloaded[j])
        self.model.add(self.free[j] <= instant).only_enforce_if(z)
        self.model.add(self.back_start[j] >= instant).only_enforce_if(z)
        return z

    def hint(self, amounts: Bytes) -> None:
        """Start from the ordered schedule that offloads some amounts, if it fits."""
        schedule = ordered_schedule(self.problem, amounts, whole=True)
        if not math.isfinite(schedule.makespan_s):
            return
        add, up = self.model.add_hint, self.ticks.up
        for variable, start_s in zip(self.start, schedule.starts_s.tolist(), strict=True):
            add(variable, up(start_s))
        for j in self.movable:
            add(self.offloaded[j], bool(amounts[j]))
            if amounts[j]:
                # The device copy is free once it is copied and F_j has read it.
                read_s = schedule.starts_s[j] + self.problem.durations_s[j]
                add(self.out_start[j], up(float(schedule.offloads_s[j, 0])))
                add(self.free[j], up(float(max(schedule.offloads_s[j, 1], read_s))))
                add(self.back_start[j], up(float(schedule.prefetches_s[j, 0])))

    def solve(self, options: SolverOptions) -> ExactSolution | None:
        """Solve; None if nothing was found in time. Limited by deterministic time, one worker gives
        the same answer every time.

        Raises:
            ValueError: the solver rejects the model.
        """
        status, solver = solve_with_cp_sat(self.model, options)
        if status not in (Status.OPTIMAL, Status.FEASIBLE):
            return None
        chosen = [j for j in self.movable if solver.boolean_value(self.offloaded[j])]
        bound = math.ceil(solver.best_objective_bound - 1e-6)
        return ExactSolution(
            out=tuple(sorted(chosen, key=lambda j: solver.value(self.out_start[j]))),
            back=tuple(sorted(chosen, key=lambda j: solver.value(self.back_start[j]))),
            time_s=solver.objective_value * self.ticks.tick_s,
            lower_bound_s=self.ticks.lower_s(bound, 2 * self.stages + 2 * len(self.movable)),
            proved=status is Status.OPTIMAL,
        )
