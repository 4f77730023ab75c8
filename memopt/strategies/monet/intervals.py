"""The retention-interval program (Moccasin, Bartan et al. 2023) with implementations.

Every forward operator runs once in the forward and at most C-1 times again, each time in a stage:
before the k-th operator after the forward, in the graph's order. So every run has an event:
run 0 of operator i at i, the boundary at F, a run in stage k at F+1 + k(F+2) + i, the stage's
own operator at the stage's last event. An operator after the forward with implementations that
write some of its outputs each (one gradient of a convolution) may run twice, by two of them, with
the event after for the second run. Every copy of a tensor that a run writes is kept from its event
to an end of its own.

Variables: x[i,c,l] run c of operator i uses implementation l (Σ_l ≤ 1; = 1 for c = 0)
    stage[i,c] the stage of run c ≥ 1; end[i,c,t] the last event of the copy of t it writes
    z        a run finds its operand in a given copy: written before, kept to the run's event
Constraints: a run of an implementation finds each of its operands in some copy; two runs after the
    forward write no tensor twice, and what the step ends with is written; one cumulative
    constraint: copies, scratch memory and the loss within the budget at every event.
Memory is counted as replay counts it, so a plan's peak is the replayed one, or less where the
program computes in place afterwards.

`search_windows` is a large-neighbourhood search by it: all but a window of operators is fixed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from memopt.errors import InvalidProgramError
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.in_place import with_in_place, without_in_place
from memopt.programs.instructions import Compute, Instruction, LossBoundary, Program
from memopt.programs.liveness import with_frees
from memopt.programs.replay import replay
from memopt.solvers.binary_program import whole_number_scale
from memopt.solvers.running import Deadline, SolverOptions, solve_with_cp_sat
from memopt.strategies.shared.graph_model import Allowed, choices_of
from memopt.strategies.shared.incumbent import Incumbent

WINDOW = 12
LARGEST_WINDOW = 96
WINDOW_S = 6.0
NEAR = 1e-6
"""Gap to the bound at which the search ends, and least share of the time that a gain must have."""
MOST_RUNS = 4
"""Programs that run some operator more often than this are not searched."""

Runs = tuple[tuple[int, int, str | None], ...]
"""(stage, operator, implementation) of every run, in order; stage -1 is the forward."""


def runs_of(graph: Graph, program: Program) -> Runs:
    """List the runs of a program: every decision of the interval program."""
    stage, found = 0, []
    for position, run in reversed(program.computes):
        if program.boundary is not None and position < program.boundary:
            stage = -1
        elif run.op >= graph.first_backward:
            stage = run.op - graph.first_backward
        found.append((stage, run.op, run.implementation))
    found.reverse()
    return tuple(sorted(found, key=lambda run: (run[0], run[1])))


def program_of(graph: Graph, runs: Runs) -> Program:
    """Make the program of runs; tensors are freed after their last reader, or overwritten by it."""
    steps: list[Instruction] = [Compute(i, (), name) for stage, i, name in runs if stage < 0]
    if graph.tangents or graph.first_backward < len(graph.operators):
        steps.append(LossBoundary())
    steps += [Compute(i, (), name) for stage, i, name in runs if stage >= 0]
    return with_in_place(graph, Program(with_frees(graph, steps)))


@dataclass
class _Copy:
    """A copy of a tensor: written at `start` if `written` holds, kept to `end`."""

    start: Any
    end: Any
    written: Any


class IntervalModel:
    """The program of a graph within a budget."""

    def __init__(
        self,
        graph: Graph,
        budget_bytes: int,
        allowed: Allowed | None = None,
        most_runs: int = 2,
    ) -> None:
        from ortools.sat.python import cp_model

        self.graph, self.most_runs = graph, most_runs
        self.model = cp_model.CpModel()
        self.first, self.count = graph.first_backward, len(graph.operators)
        self.width = self.first + 2
        self.end = self.first + self.width * (self.count - self.first)
        self.choices = [choices_of(operator, allowed) for operator in graph.operators]
        self.copies: dict[int, list[_Copy]] = defaultdict(list)
        self.x: dict[tuple[int, int], list[Any]] = {}
        """Choices of (operator, run); also run 0 of the operators after the forward."""
        self.stage: dict[tuple[int, int], Any] = {}
        self.intervals: list[Any] = []
        self.demands: list[int] = []
        self._boundary()
        for i in range(self.count):
            self._operator(i)
        for i, run in self.x:
            self._operands(i, run)
        self.model.add_cumulative(
            self.intervals, self.demands, max(0, budget_bytes - graph.resident_bytes)
        )
        self.possible = budget_bytes >= graph.resident_bytes
        cost = [
            (choice.time_s, v)
            for (i, _), variables in self.x.items()
            for (_, choice), v in zip(self.choices[i], variables, strict=True)
        ]
        self.scale = whole_number_scale(seconds for seconds, _ in cost)
        self.cost = sum(int(seconds * self.scale) * v for seconds, v in cost)
        self.model.minimize(self.cost)

    def _event(self, i: int, run: int) -> Any:
        start = self.first + 1
        if i >= self.first:
            return start + self.width * (i - self.first) + self.first + run
        return start + self.width * self.stage[i, run] + i if run else i

    def _copy(self, t: int, start: Any, written: Any, to_the_end: bool) -> None:
        """Add a copy of a tensor and its interval."""
        model, size = self.model, self.graph.tensors[t].size_bytes
        last = self.end if to_the_end else model.new_int_var(0, self.end, "")
        self.copies[t].append(_Copy(start, last, written))
        if not to_the_end:
            model.add(last >= start)
        if size:
            length = model.new_int_var(1, self.end + 1, "")
            self.intervals.append(
                model.new_optional_interval_var(start, length, last + 1, written, "")
            )
            self.demands.append(size)

    def _boundary(self) -> None:
        model, graph = self.model, self.graph
        for t in graph.tangents:
            self._copy(t, self.first, model.new_constant(1), t in graph.kept)
        if graph.boundary_bytes:
            self.intervals.append(model.new_fixed_size_interval_var(self.first, 1, ""))
            self.demands.append(graph.boundary_bytes)

    def _operator(self, i: int) -> None:
        """Add the runs of an operator, its scratch memory, the copies it writes."""
        model, operator = self.model, self.graph.operators[i]
        again = i < self.first and operator.recomputable
        parts = [set(choice.writes) < set(operator.writes) for _, choice in self.choices[i]]
        partial = i >= self.first and any(parts)
        split = partial and operator.recomputable
        for run in range(self.most_runs if again else 1 + split):
            x = self.x[i, run] = [model.new_bool_var("") for _ in self.choices[i]]
            if not run:
                model.add_exactly_one(x)
            else:
                model.add_at_most_one(x)
            if split and run:
                for v, part in zip(x, parts, strict=True):
                    if not part:
                        model.add(v == 0)
            elif run:
                self.stage[i, run] = model.new_int_var(0, self.count - self.first - 1, "")
                if run > 1:
                    model.add(sum(x) <= sum(self.x[i, run - 1]))
                    model.add(self.stage[i, run] > self.stage[i, run - 1]).only_enforce_if(
                        self._one_of(x)
                    )
            start = self._event(i, run)
            for (_, choice), v in zip(self.choices[i], x, strict=True):
                if choice.workspace_bytes:
                    self.intervals.append(
                        model.new_optional_fixed_size_interval_var(start, 1, v, "")
                    )
                    self.demands.append(choice.workspace_bytes)
            writes = dict.fromkeys(t for _, choice in self.choices[i] for t in choice.writes)
            for t in writes:
                pairs = zip(self.choices[i], x, strict=True)
                written = self._one_of([v for (_, choice), v in pairs if t in choice.writes])
                self._copy(t, start, written, t in self.graph.kept and not (run and again))
        if partial:
            for t in operator.writes:
                written = [copy.written for copy in self.copies[t]]
                model.add(sum(written) <= 1)
                if t in self.graph.kept:
                    model.add_bool_or(written)

    def _one_of(self, literals: list[Any]) -> Any:
        """Return a literal that is the sum of literals of which at most one holds."""
        if len(literals) == 1:
            return literals[0]
        either = self.model.new_bool_var("")
        self.model.add(sum(literals) == either)
        return either

    def _operands(self, i: int, run: int) -> None:
        """Require that a run's implementation finds its operands."""
        model, event = self.model, self._event(i, run)
        reads = dict.fromkeys(t for _, choice in self.choices[i] for t in choice.reads)
        for t in reads:
            if t in self.graph.resident:
                continue
            pairs = zip(self.choices[i], self.x[i, run], strict=True)
            reader = self._one_of([v for (_, choice), v in pairs if t in choice.reads])
            copies = self.copies[t]
            if i < self.first and not run:
                copies = copies[:1]
            found = []
            for copy in copies:
                there = reader if len(copies) == 1 else model.new_bool_var("")
                found.append(there)
                model.add_implication(there, copy.written)
                model.add(copy.start < event).only_enforce_if(there)
                model.add(copy.end >= event).only_enforce_if(there)
            model.add_bool_or([*found, ~reader])

    def start(self, runs: Runs, free: set[int] | None = None) -> bool:
        """Begin from the runs of a program; False if this program cannot express them.

        Args:
            runs: as `runs_of` gives them.
            free: forward operators whose runs may change; the others' are fixed. None: all.
        """
        model = self.model
        numbered: dict[tuple[int, int], tuple[int, str | None]] = {}
        number: dict[int, int] = defaultdict(int)
        for stage, i, name in runs:
            key = (i, number[i])
            number[i] += 1
            if key not in self.x or (stage < 0) != (key[1] == 0 and i < self.first):
                return False
            numbered[key] = (stage, name)
        for key, variables in self.x.items():
            fixed = free is not None and key[0] < self.first and key[0] not in free
            stage, name = numbered.get(key, (0, ""))
            for (other, _), v in zip(self.choices[key[0]], variables, strict=True):
                value = key in numbered and other == name
                model.add_hint(v, value)
                if fixed:
                    model.add(v == int(value))
            if key in self.stage:
                model.add_hint(self.stage[key], max(0, stage))
                if fixed:
                    model.add(self.stage[key] == max(0, stage))
        return True

    def solve(
        self, time_limit_s: float | None = None, seed: int = 0, below_s: float | None = None
    ) -> tuple[Status, Runs | None, float]:
        """Return (status, the runs of the fastest program found, a bound in seconds for the class).

        Args:
            time_limit_s: seconds at most.
            seed: the solver's.
            below_s: only look for programs that take less.
        """
        if not self.possible:
            return Status.INFEASIBLE, None, float("inf")
        if below_s is not None:
            self.model.add(self.cost <= int(below_s * self.scale))
        limit_s = None if time_limit_s is None else max(0.01, time_limit_s)
        options = SolverOptions(time_limit_s=limit_s, seed=seed)
        status, solver = solve_with_cp_sat(self.model, options, scale=self.scale)
        bound = solver.best_objective_bound / self.scale
        if status not in (Status.OPTIMAL, Status.FEASIBLE):
            return status, None, bound
        runs = []
        for (i, run), variables in self.x.items():
            for (name, _), v in zip(self.choices[i], variables, strict=True):
                if solver.value(v):
                    stage = i - self.first if i >= self.first else -1
                    if (i, run) in self.stage:
                        stage = solver.value(self.stage[i, run])
                    runs.append((stage, i, name))
        return status, tuple(sorted(runs, key=lambda r: (r[0], r[1]))), bound


def search_windows(
    best: Incumbent,
    allowed: Allowed | None,
    budget_bytes: int,
    deadline: Deadline,
    bound_s: float = 0.0,
) -> int:
    """Offer `best` faster programs; return the number of windows solved.

    Windows of neighbouring forward operators are freed in turn, half of each overlapping the next.
    They grow after a round that finds nothing faster."""
    assert best.program is not None
    graph, runs, solved = best.graph, runs_of(best.graph, best.program), 0
    if not _fits(graph, runs, budget_bytes):
        return solved
    # Copies here all have storages of their own. A start with in-place outputs is no solution of
    # this program; programs that it finds must keep the budget.
    separate = without_in_place(program_of(graph, runs))
    room_bytes = max(budget_bytes, replay(graph, separate).peak_bytes)
    size = WINDOW
    while size <= LARGEST_WINDOW:
        faster = False
        for window in _windows(graph, runs, size):
            done = best.near(bound_s, NEAR)
            if done or deadline.passed(0.7, f"monet: windows, best {best.time_s:.6g} s"):
                return solved
            built = IntervalModel(graph, room_bytes, allowed, _most(runs))
            if not built.start(runs, window):
                return solved
            limit_s = min(WINDOW_S, deadline.left_s)
            _, found, _ = built.solve(limit_s, below_s=best.time_s * (1 - NEAR))
            solved += 1
            if found is not None and _fits(graph, found, budget_bytes):
                candidate = program_of(graph, found)
                best.offer(candidate, "windows")
                if best.program is candidate:
                    runs, faster = found, True
        size = size if faster else 2 * size
    return solved


def _most(runs: Runs) -> int:
    """Return one run more than any operator has, at least two."""
    number: dict[int, int] = defaultdict(int)
    for _, i, _ in runs:
        number[i] += 1
    return max(2, *number.values())


def _fits(graph: Graph, runs: Runs, budget_bytes: int) -> bool:
    """Tell whether the runs, in this program's order, fit the budget."""
    if _most(runs) > MOST_RUNS:
        return False
    try:
        return replay(graph, program_of(graph, runs)).peak_bytes <= budget_bytes
    except InvalidProgramError:
        return False


def _windows(graph: Graph, runs: Runs, size: int) -> list[set[int]]:
    """List sets of neighbouring forward operators, those with the longest repeated runs first."""
    again: dict[int, float] = defaultdict(float)
    for stage, i, _ in runs:
        if stage >= 0 and i < graph.first_backward:
            again[i] += graph.operators[i].time_s
    starts = range(0, max(1, graph.first_backward - size // 2), max(1, size // 2))
    windows = [set(range(s, min(s + size, graph.first_backward))) for s in starts]
    return sorted(
        (window for window in windows if any(again[i] for i in window)),
        key=lambda window: -sum(again[i] for i in window),
    )
