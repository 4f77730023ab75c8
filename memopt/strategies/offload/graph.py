"""offload-graph: which tensors of any graph to move, and when."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np

from memopt.errors import InfeasibleBudgetError
from memopt.models.bounds import memory_lower_bound
from memopt.models.budget import Budget
from memopt.models.checks import check_bytes
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.progress import stops
from memopt.models.status import Status
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import Timeline, replay
from memopt.programs.solution import Solution
from memopt.programs.validate import validate
from memopt.reductions.linearize import linearize
from memopt.reductions.stage_map import has_updates
from memopt.solvers.running import Deadline, Stopped
from memopt.strategies.base import CostModel, Features, Progress, Strategy, solution_of
from memopt.strategies.budget_search import best_that_fits
from memopt.strategies.moving.on_host import without_host_updates
from memopt.strategies.moving.planning import (
    Limits,
    activation_bases,
    early_steps,
    fixed_graph,
    planned_moves,
)
from memopt.strategies.offload.chain_offload import PAPER, linked
from memopt.strategies.offload.dynprog import DynProg, Greedy
from memopt.strategies.offload.graph_schedule import schedule
from memopt.strategies.shared.graph_problem import Absence, GraphProblem, graph_problem
from memopt.strategies.shared.timing import TIMINGS

PROVED = 1e-12
"""Gap at which a plan is optimal, since float sums depend on their order."""
OFFERS = 3.0
"""What another program and the last checks take, as a multiple of a program's replay."""
SHARES = (0.8, 0.5, 0.25)
"""Shares of the room for activations, where parameters move, too."""

Score = Callable[[GraphProblem, Absence], tuple[float, ...]]


@dataclass(frozen=True)
class OffloadGraph(Strategy):
    """Moves saved tensors of any model to the host, chain of layers or not; recomputes nothing.

    Operators keep the graph's order and run once. Several covers of the excess are made and
    scheduled, the chain offloaders' plans join where the graph has a chain, the replay chooses
    the fastest, and a local search drops and exchanges absences.

    Attributes:
        host_budget_bytes: the most that may be on the host at once; None: no limit.
        moves: schedules that the local search may try.
        chain: whether `dynprog` and `greedy`, lowered to the graph, are candidates too.
        exact_only: where parameters move, leave out updates on the host that round otherwise than
            the device's.
    """

    host_budget_bytes: int | None = None
    moves: int = 60
    chain: bool = True
    exact_only: bool = True

    name: ClassVar[str] = "offload-graph"
    needs: ClassVar[str] = "graph"
    features: ClassVar[Features] = Features(offload=True, host_updates=True)
    references: ClassVar[tuple[str, ...]] = (PAPER,)

    def __post_init__(self) -> None:
        check_bytes("OffloadGraph", moves=self.moves)
        if self.host_budget_bytes is not None:
            check_bytes("OffloadGraph", host_budget_bytes=self.host_budget_bytes)

    def solve(
        self,
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        started = time.monotonic()
        graph = self.taken(cost_model, Graph)
        if graph.movable:
            return self._with_moves(graph, budget_bytes, device, time_limit_s, progress)
        problem = graph_problem(graph, linked(self, device))
        budget = problem.peak_bytes if budget_bytes is None else budget_bytes
        if budget < problem.floor_bytes:
            return self._below(problem, budget, started)
        end_s = math.inf if time_limit_s is None else started + time_limit_s
        search = _Candidates(problem, budget, self._host_bytes, Deadline(end_s, progress))
        if problem.peak_bytes <= budget:
            search.offer(store_all(graph), "nothing moves")
        else:
            with contextlib.suppress(KeyboardInterrupt, Stopped):
                self._search(search)
        return search.solution(self.name, started)

    def _with_moves(
        self,
        graph: Graph,
        budget_bytes: int | None,
        device: Device | None,
        time_limit_s: float | None,
        progress: Progress | None,
    ) -> Solution:
        """Plan a step whose parameters may move; never slower than with resident parameters."""
        began_s = time.monotonic()
        end_s = math.inf if time_limit_s is None else began_s + time_limit_s

        def resident(step: Graph, within: int | None) -> Solution:
            left_s = None if time_limit_s is None else max(0.0, end_s - time.monotonic()) / 4
            with contextlib.suppress(InfeasibleBudgetError):  # of the host
                return self.solve(
                    step, within, device=device, time_limit_s=left_s, progress=progress
                )

            return Solution(Status.UNKNOWN)

        fixed = fixed_graph(graph)
        graph = without_host_updates(graph, inexact_only=True) if self.exact_only else graph
        if budget_bytes is None:
            return resident(fixed, None)
        # Its own plan of least memory, which is below that budget, would be of no use here.
        fits = budget_bytes >= graph_problem(fixed, linked(self, device)).floor_bytes
        known = resident(fixed, budget_bytes) if fits else None
        limits = Limits(budget_bytes, self._host_bytes, Deadline(end_s, progress))
        bases = itertools.chain(
            (("every operator once", base) for base in early_steps(graph)),
            activation_bases(graph, budget_bytes, resident, SHARES),
        )
        return planned_moves(graph, linked(self, device), limits, bases, self.name, known)

    @property
    def _host_bytes(self) -> float:
        return math.inf if self.host_budget_bytes is None else self.host_budget_bytes

    def _below(self, problem: GraphProblem, budget_bytes: int, started: float) -> Solution:
        """Answer a budget below the floor: no plan, but the plan at the floor, in which every
        absence moves (none, if the host has no room).

        If outputs may be computed in place afterwards, or the loss boundary writes buffers back
        before anything is fetched for it, a program may need less: the floor is no proof then.
        """
        floor_bytes, graph = problem.floor_bytes, problem.graph
        search = _Candidates(problem, floor_bytes, self._host_bytes)
        search.scheduled(problem.absences)
        if search.best is None:
            search.offer(store_all(graph), "nothing moves")
        least = search.solution(self.name, started)
        if least.peak_bytes is not None and least.peak_bytes <= budget_bytes:
            return least
        in_place = any(operator.in_place for operator in graph.operators)
        above = in_place or bool(graph.written_back)
        proved = not above or budget_bytes < memory_lower_bound(graph)
        return Solution(
            Status.INFEASIBLE if proved else Status.UNKNOWN,
            smallest_budget_bytes=least.peak_bytes,
            smallest=least,
        )

    def _search(self, search: _Candidates) -> None:
        """Try covers, then chain plans, then exchanges, until the deadline."""
        for number, absences in enumerate(covers(search.problem, search.budget_bytes)):
            # The first cover is a plan, which even a caller who stops at once must get.
            search.scheduled(absences)
            search.tell(0.4 * number / (1 + len(SCORES)), "covering the excess")
            if search.late:
                return
        if self.chain:
            search.tell(0.4, "plans of chains")
            search.chains(self.host_budget_bytes)
        search.improve(self.moves)


@dataclass
class _Candidates:
    """Holds the fastest program offered so far, and the absences it came from."""

    problem: GraphProblem
    budget_bytes: int
    host_bytes: float
    deadline: Deadline = field(default_factory=Deadline)
    best: tuple[Program, Timeline, str] | None = None
    start: tuple[Absence, ...] | None = None
    start_s: float = math.inf
    offer_s: float = 0.0
    """The most seconds in which a program was written and replayed."""
    least_host_bytes: int = 0

    @cached_property
    def bound_s(self) -> float:
        """Return a lower bound on the time of programs within the budget."""
        return self.problem.lower_bound_s(self.budget_bytes)

    @property
    def done(self) -> bool:
        """Tell whether nothing can be faster."""
        return self.best is not None and self.best[1].time_s <= self.bound_s * (1 + PROVED)

    @property
    def late(self) -> bool:
        """Tell whether there is a plan to return, and no time for another and its checks."""
        return self.best is not None and self.deadline.left_s <= OFFERS * self.offer_s

    def tell(self, fraction: float, what: str) -> None:
        """Report progress; an error that the listener raises ends the search."""
        if stops(self.deadline.progress, fraction, what):
            raise Stopped

    def offer(self, program: Program, source: str) -> None:
        """Replay a program and keep it if it is the fastest within the host budget."""
        timeline = replay(self.problem.graph, program, self.problem.device)
        if not self._has_room(timeline.host_peak_bytes):
            return
        if self.best is None or timeline.time_s < self.best[1].time_s:
            self.best = program, timeline, source

    def _has_room(self, host_bytes: int) -> bool:
        """Tell whether the host has room for so much; record the least that was asked for."""
        self.least_host_bytes = min(self.least_host_bytes or host_bytes, host_bytes)
        return host_bytes <= self.host_bytes

    def scheduled(self, absences: tuple[Absence, ...]) -> float:
        """Schedule a set of absences under every timing, offer the programs, and return the least
        time."""
        least_s = math.inf
        for timing in TIMINGS:
            if self.done or self.late:
                break
            made = schedule(self.problem, self.budget_bytes, absences, timing)
            if not self._has_room(made.host_bytes):
                continue
            if self.best is None or made.time_s < self.best[1].time_s:
                begin_s = time.monotonic()
                self.offer(made.program(), "gaps")
                self.offer_s = max(self.offer_s, time.monotonic() - begin_s)
            least_s = min(least_s, made.time_s)
            if made.time_s < self.start_s:
                self.start, self.start_s = made.used, made.time_s
        return least_s

    def chains(self, host_budget_bytes: int | None) -> None:
        """Offer the chain offloaders' plans within the budget, lowered, if there are any."""
        graph, device = self.problem.graph, self.problem.device
        if has_updates(graph):
            return  # no chain expresses parameter updates
        view = linearize(graph)
        for strategy in (DynProg(host_budget_bytes), Greedy(host_budget_bytes)):
            if self.done or self.late or strategy.why_not(view.chain) is not None:
                continue

            def attempt(budget_bytes: int | None, strategy: Strategy = strategy) -> Solution:
                return strategy.solve(view.chain, budget_bytes, device=device)

            try:
                found = best_that_fits(view, attempt, self.budget_bytes, 0)
            except InfeasibleBudgetError:
                continue  # the chain's plan needs more host memory than there is
            if found.steps is None:
                continue
            program = view.lower(found.steps)
            if validate(graph, program, Budget(self.budget_bytes, host_budget_bytes)) is None:
                self.offer(program, strategy.name)

    def improve(self, moves: int) -> None:
        """Drop absences, and exchange absences for others, while that is faster."""
        tried = 0
        while self.start is not None and not self.done:
            absences = self.start
            before_s = self.start_s
            for changed in _neighbours(self.problem, self.budget_bytes, absences):
                if tried >= moves or self.done or self.late:
                    return
                tried += 1
                self.tell(0.5 + 0.5 * tried / moves, "exchanging tensors")
                if self.scheduled(changed) < before_s:
                    break
            else:
                return

    def solution(self, name: str, started: float) -> Solution:
        if self.best is None:
            raise InfeasibleBudgetError(
                f"{name}: host_budget_bytes={self.host_bytes} is too small: the plans known for a "
                f"device budget of {self.budget_bytes} bytes put at least {self.least_host_bytes} "
                "bytes on the host; raise either",
                self.budget_bytes,
                None,
            )
        program, timeline, source = self.best
        stats = {
            "source": source,
            "gaps": len(self.problem.absences),
            "stall_s": timeline.total_stall_s,
            "host_peak_bytes": timeline.host_peak_bytes,
            "solve_s": time.monotonic() - started,
        }
        return solution_of(program, timeline, self.bound_s, PROVED, stats)


def covers(problem: GraphProblem, budget_bytes: int) -> Iterator[tuple[Absence, ...]]:
    """Yield sets of absences that cover the excess of every point: all, then one per score."""
    yield problem.absences
    for score in SCORES:
        yield _cover(problem, budget_bytes, score)


SCORES: tuple[Score, ...] = (
    lambda problem, one: (one.after, -one.before),
    lambda problem, one: (one.after - one.before, one.after),
    lambda problem, one: (-problem.size_bytes(one), one.after),
    lambda problem, one: (-problem.size_bytes(one) * (one.before - one.after), one.after),
)
"""Orders in which absences are taken: earliest, longest, largest, largest times longest first."""


def _cover(problem: GraphProblem, budget_bytes: int, score: Score) -> tuple[Absence, ...]:
    """Take absences by score while they help an uncovered point; then drop superfluous ones."""
    lacking = problem.need_bytes - budget_bytes
    taken: list[Absence] = []
    for absence in sorted(problem.absences, key=lambda absence: (score(problem, absence), absence)):
        inside = slice(absence.after + 1, absence.before)
        if (lacking[inside] > 0).any():
            lacking[inside] -= problem.size_bytes(absence)
            taken.append(absence)
    for absence in reversed(taken.copy()):
        inside = slice(absence.after + 1, absence.before)
        if int(lacking[inside].max()) + problem.size_bytes(absence) <= 0:
            lacking[inside] += problem.size_bytes(absence)
            taken.remove(absence)
    return tuple(sorted(taken))


def _neighbours(
    problem: GraphProblem, budget_bytes: int, absences: tuple[Absence, ...]
) -> Iterator[tuple[Absence, ...]]:
    """Yield sets that still cover: one absence less, or one exchanged; large absences first."""
    lacking = problem.need_bytes - problem.relieved_bytes(absences) - budget_bytes
    others = sorted(set(problem.absences) - set(absences), key=lambda g: (problem.size_bytes(g), g))
    for absence in sorted(absences, key=lambda g: (-problem.size_bytes(g), g)):
        without = lacking.copy()
        without[absence.after + 1 : absence.before] += problem.size_bytes(absence)
        rest = tuple(other for other in absences if other != absence)
        short = np.flatnonzero(without > 0)
        if not len(short):
            yield rest
            continue
        wanted = int(without.max())
        for other in others:
            if problem.size_bytes(other) < wanted:
                continue
            if other.after < short[0] and short[-1] < other.before:
                yield tuple(sorted((*rest, other)))
