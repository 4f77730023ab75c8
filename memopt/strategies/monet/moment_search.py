"""Programs from the relaxation with moments: where one needs too much memory, a moment is put."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from memopt.models.graph import Graph
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Compute, LossBoundary, Program
from memopt.programs.replay import Timeline, replay
from memopt.strategies.base import Progress, Status, stops
from memopt.strategies.monet.backend import Solver
from memopt.strategies.monet.fitting import fitted
from memopt.strategies.monet.moments import Allowed, MomentModel

MOST_MOMENTS = 4
MOST_MORE = 8
"""So many are added at most to raise the bound."""
MOST_ROUNDS = 24
CLOSE = 5e-3
"""Gap between bound and program at which the search ends."""
GAP = 1e-3
ROUND_SHARE = 0.25
"""Share of the time left that one solve may take."""
BOUNDARY = -1


@dataclass
class MomentSearch:
    """Solves the relaxation again and again, with moments and slack where its program overflows.

    Attributes:
        graph, allowed: as for `MomentModel`.
        budget_bytes: total bytes.
        deadline: on time.monotonic's clock.
        progress: called before every solve; KeyboardInterrupt ends the search.
        best: the fastest program found within the budget.
        best_s: its time, seconds.
        bound_s: what no program of the relaxation's class beats, seconds.
        infeasible: whether the relaxation proved that there is none.
    """

    graph: Graph
    allowed: Allowed | None
    budget_bytes: int
    deadline: float
    progress: Progress | None = None
    best: Program | None = None
    best_s: float = float("inf")
    bound_s: float = 0.0
    infeasible: bool = False
    rounds: int = 0
    slack: dict[int, int] = field(default_factory=lambda: {BOUNDARY: 0})
    """Moment → bytes left free there; the boundary's key is BOUNDARY."""

    def run(self) -> None:
        """Search until a program fits, or nothing more can be tried."""
        while self.rounds < MOST_ROUNDS and not self._stopped():
            found = self._solved(self.slack)
            if found is None:
                return
            if found[1].peak_bytes <= self.budget_bytes:
                break
            self._tighten(*found)
        self._raise_bound()

    def _solved(self, slack: dict[int, int]) -> tuple[Program, Timeline] | None:
        """The relaxation's program under moments and slack, kept if it is the best; its bound."""
        keys = sorted(slack)
        free = tuple(slack[key] for key in keys)
        built = MomentModel(self.graph, self.allowed, tuple(keys[1:]), free)
        left_s = self.deadline - time.monotonic()
        answer = built.model.solve(
            self.budget_bytes - self.graph.resident_bytes,
            time_limit_s=left_s if not self.rounds else max(1.0, ROUND_SHARE * left_s),
            progress=self.progress,
            solver=Solver.HIGHS,
            gap=GAP,
        )
        self.rounds += 1
        if not any(free):
            self.bound_s = max(self.bound_s, answer.bound)
            self.infeasible = self.infeasible or answer.status is Status.INFEASIBLE
        if not answer.values:
            return None
        program = with_in_place(self.graph, built.program(answer.values))
        timeline = replay(self.graph, program)
        if timeline.peak_bytes > self.budget_bytes:
            program = fitted(self.graph, program, self.budget_bytes, self.allowed)
            timeline = replay(self.graph, program)
        if timeline.peak_bytes <= self.budget_bytes and timeline.time_s < self.best_s:
            self.best, self.best_s = program, timeline.time_s
        return program, timeline

    def _raise_bound(self) -> None:
        """More moments, nothing left free, while the bound is not close to the best program."""
        moments = dict.fromkeys(self.slack, 0)
        most = len(moments) + MOST_MORE
        while len(moments) < most and self.best_s > self.bound_s * (1 + CLOSE):
            found = None if self._stopped() else self._solved(moments)
            if found is None or found[1].peak_bytes <= self.budget_bytes:
                return
            key = self._worst(*found, set(moments))
            if key is None:
                return
            moments[key] = 0

    def _worst(self, program: Program, timeline: Timeline, known: set[int]) -> int | None:
        """The backward operator, none of the known ones, before whose end a program overflows
        most."""
        worst, most, need = None, self.budget_bytes, 0
        after = False
        for step, size_bytes in zip(program, timeline.step_bytes, strict=True):
            after = after or isinstance(step, LossBoundary)
            need = max(need, size_bytes)
            if after and isinstance(step, Compute) and step.op >= self.graph.first_backward:
                if need > most and step.op not in known:
                    worst, most = step.op, need
                need = 0
        return worst

    def _stopped(self) -> bool:
        what = f"monet: relaxation {self.rounds}, bound {self.bound_s:.6g} s"
        return stops(self.progress, 0.3, what) or time.monotonic() >= self.deadline

    def _tighten(self, program: Program, timeline: Timeline) -> None:
        """A moment where the program needs most, or more slack at the one that is there."""
        peak = timeline.peak_instruction or 0
        excess = timeline.peak_bytes - self.budget_bytes
        key = BOUNDARY
        if any(isinstance(step, LossBoundary) for step in program.instructions[:peak]):
            later = (x.op for x in program.instructions[peak:] if isinstance(x, Compute))
            key = next((op for op in later if op >= self.graph.first_backward), BOUNDARY)
        small = 30 * excess < self.budget_bytes
        if key not in self.slack and (small or len(self.slack) > MOST_MOMENTS):
            # What is left free at an operator that does not run has no effect.
            ran = {step.op for step in program if isinstance(step, Compute)} | {BOUNDARY}
            key = max(k for k in self.slack if k <= key and k in ran)
        if key in self.slack:
            self.slack[key] += excess
        else:
            self.slack[key] = 0
