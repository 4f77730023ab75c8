"""Programs from the relaxation with time points; one is added where a program needs too much."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from memopt.models.bounds import time_lower_bound
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.replay import Timeline
from memopt.solvers.binary_program import Answer
from memopt.solvers.running import Deadline, Solver, SolverOptions
from memopt.strategies.shared.graph_model import Allowed
from memopt.strategies.shared.incumbent import Incumbent
from memopt.strategies.shared.kernel_choice import smaller_implementations
from memopt.strategies.shared.time_points import TimePointModel

MOST_TIME_POINTS = 4
MOST_MORE = 8
"""The most time points added to raise the bound."""
MOST_ROUNDS = 24
CLOSE = 5e-3
"""Gap between bound and program at which the search ends."""
GAP = 1e-3
ROUND_SHARE = 0.25
"""Share of the time left that one solve may take."""
BUILD_S = 3e-4
"""Seconds per operator in which a relaxation is built and its program judged, on a core of 2024."""
BOUNDARY = -1


@dataclass
class TimePointSearch:
    """Solves the relaxation repeatedly, adding time points and slack where its program needs too
    much memory.

    Attributes:
        graph, allowed: as for `TimePointModel`.
        budget_bytes: total bytes.
        deadline: asked before every solve.
        best: the fastest program found within the budget.
        bound_s: a lower bound on the time of every program of the relaxation's class, seconds.
        infeasible: whether the relaxation proved that there is none.
    """

    graph: Graph
    allowed: Allowed | None
    budget_bytes: int
    deadline: Deadline
    bound_s: float = 0.0
    infeasible: bool = False
    rounds: int = 0
    build_s: float = field(default=0.0, init=False)
    """Seconds that a round takes beside the solver's: without them left, none is begun."""
    solver_s: float = field(default=0.0, init=False)
    """Seconds that the solver took in the last round."""
    slack: dict[int, int] = field(default_factory=lambda: {BOUNDARY: 0})
    """Time point → bytes left free there; the boundary's key is BOUNDARY."""

    def __post_init__(self) -> None:
        self.best = Incumbent(self.graph, self.budget_bytes, tolerance=0.0)

    def run(self) -> TimePointSearch:
        """Search until a program fits, or nothing more can be tried; return this search."""
        self.build_s = BUILD_S * len(self.graph.operators)
        while self.rounds < MOST_ROUNDS and not self._stopped():
            found = self._round(self.slack)
            if found is None:
                return self
            if found[1].peak_bytes <= self.budget_bytes:
                break
            self._tighten(*found)
        self._raise_bound()
        return self

    def _round(self, slack: dict[int, int]) -> tuple[Program, Timeline] | None:
        """Solve once, and learn how long that takes beside the solver."""
        begin_s = time.monotonic()
        found = self._solved(slack)
        self.build_s = max(self.build_s, time.monotonic() - begin_s - self.solver_s)
        return found

    def _answer(self, built: TimePointModel, gap: float) -> Answer:
        """Solve a relaxation that is built, in its share of the time that is left."""
        begin_s, left_s = time.monotonic(), self.deadline.left_s
        options = SolverOptions(
            Solver.HIGHS,
            time_limit_s=min(left_s, max(1.0, ROUND_SHARE * left_s)) if self.rounds else left_s,
            progress=self.deadline.progress,
            gap=gap,
        )
        answer = built.model.solve(self.budget_bytes - self.graph.resident_bytes, options)
        self.rounds += 1
        self.solver_s = time.monotonic() - begin_s
        return answer

    def _solved(self, slack: dict[int, int]) -> tuple[Program, Timeline] | None:
        """Solve the relaxation under time points and slack; keep its program and its bound."""
        keys = sorted(slack)
        free = tuple(slack[key] for key in keys)
        built = TimePointModel(self.graph, self.allowed, tuple(keys[1:]), free)
        answer = self._answer(built, GAP)
        if not any(free):
            self.bound_s = max(self.bound_s, answer.bound, time_lower_bound(self.graph))
            self.infeasible = self.infeasible or answer.status is Status.INFEASIBLE
        if not answer.values:
            return None
        program = with_in_place(self.graph, built.program(answer.values))
        timeline = self.best.offer(program)
        if timeline.peak_bytes > self.budget_bytes:
            program = smaller_implementations(self.graph, program, self.budget_bytes, self.allowed)
            timeline = self.best.offer(program)
        return program, timeline

    def _raise_bound(self) -> None:
        """Add time points, without slack, while the bound is not close to the best program."""
        points = dict.fromkeys(self.slack, 0)
        most = len(points) + MOST_MORE
        while len(points) < most and not self.best.near(self.bound_s, CLOSE):
            found = None if self._stopped() else self._round(points)
            if found is None or found[1].peak_bytes <= self.budget_bytes:
                return
            key = self._worst(*found, set(points))
            if key is None:
                return
            points[key] = 0

    def _worst(self, program: Program, timeline: Timeline, known: set[int]) -> int | None:
        """Find the backward operator, outside `known`, before whose end memory exceeds most."""
        worst, most, need = None, self.budget_bytes, 0
        backward = self._backward_runs(program)
        for position, size_bytes in enumerate(timeline.step_bytes):
            need = max(need, size_bytes)
            if position in backward:
                if need > most and backward[position] not in known:
                    worst, most = backward[position], need
                need = 0
        return worst

    def _backward_runs(self, program: Program) -> dict[int, int]:
        """Find the runs of backward operators: position → operator, ascending."""
        first = self.graph.first_backward
        return {position: run.op for position, run in program.computes if run.op >= first}

    def _stopped(self) -> bool:
        what = f"monet: relaxation {self.rounds}, bound {self.bound_s:.6g} s"
        return self.deadline.passed(0.3, what) or self.deadline.left_s < self.build_s

    def _tighten(self, program: Program, timeline: Timeline) -> None:
        """Add a time point where the program needs most, or more slack at the time point before."""
        peak = timeline.peak_instruction or 0
        excess = timeline.peak_bytes - self.budget_bytes
        key = BOUNDARY
        if program.boundary is not None and program.boundary < peak:
            later = self._backward_runs(program).items()
            key = next((op for position, op in later if position >= peak), BOUNDARY)
        small = 30 * excess < self.budget_bytes
        if key not in self.slack and (small or len(self.slack) > MOST_TIME_POINTS):
            # Slack at an operator that does not run has no effect.
            ran = {run.op for _, run in program.computes} | {BOUNDARY}
            key = max(k for k in self.slack if k <= key and k in ran)
        if key in self.slack:
            self.slack[key] += excess
        else:
            self.slack[key] = 0
