"""One solve of the joint strategy: starts, the relaxation, local search, and what is proved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from memopt.models.bounds import memory_lower_bound, time_lower_bound
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.solvers.running import Deadline
from memopt.strategies.base import solution_of
from memopt.strategies.joint.deep_planning import (
    DEEP,
    GROUPS,
    DeepPlanning,
    Planned,
    folded_into,
)
from memopt.strategies.joint.equal_layers import RepeatedLayers
from memopt.strategies.joint.incumbent import PROVED, JointIncumbent
from memopt.strategies.joint.least_memory import least_memory, program_within, smaller
from memopt.strategies.joint.local_search import LocalSearch, annealings
from memopt.strategies.joint.moved import Moved, Mover, least_moved
from memopt.strategies.joint.neighbours import Decisions
from memopt.strategies.joint.relaxation import LinkedSearch
from memopt.strategies.shared.chain_programs import (
    programs_of_chain,
    rotor_programs_above,
    stage_orders_above,
)
from memopt.strategies.shared.fastest_runs import fastest_program
from memopt.strategies.shared.graph_model import Allowed
from memopt.strategies.shared.graph_problem import graph_problem
from memopt.strategies.shared.incumbent import stored
from memopt.strategies.shared.members import Member
from memopt.strategies.shared.run_table import Ints, RunTable
from memopt.strategies.shared.worth import Payback
from memopt.strategies.target import Target

FIRST_SHARE, START_SHARE, RELAXATION_SHARE, SWEEP_SHARE, DESCENT_SHARE = 0.2, 0.4, 0.4, 0.4, 0.4
"""Shares of the time left: for the descent before all else, single strategies' plans, the
relaxation, programs in larger budgets, and descents beyond the first."""
CHECKS, ALL_CHECKS, GRACE_S, MOST_CHECKS = 4.0, 12.0, 0.3, 0.3
"""Time kept for the last checks, in times of replaying store-all; what all that comes after takes,
less so many seconds; and the most of the time left."""
BEGIN_S = 5e-5
"""Seconds per operator without which no single strategy is asked where a plan stands."""
DESCENTS = 12
"""Starts of the local search."""
FIRST_CHANGES, CHANGES_EACH = 1500, 50
"""The most changes of the first descent; and of annealing per operator, or as many as those."""
MOVERS, CHAINS = frozenset({"offload-graph"}), frozenset({"rotor-menus"})
"""Strategies that only move, and strategies that start where the relaxation has no plan close to
the bound. The others start if a descent from these plans finds none either."""


@dataclass(eq=False)
class JointPlanning(JointIncumbent):
    """The state of planning one budget.

    Attributes:
        allowed: which implementations may be chosen.
        changes: the most changes that each annealing tries.
        seed: the local search's.
        least_bytes: tensors smaller than this never move; None: as SMALL says.
        known: further programs to start from.
    """

    allowed: Allowed = field(kw_only=True)
    changes: int = field(kw_only=True)
    seed: int = field(kw_only=True)
    infeasible: bool = False
    runs: list[Ints] = field(default_factory=list)
    relaxed: frozenset[bytes] = frozenset()
    small: list[Program] = field(default_factory=list)
    decisions: tuple[Decisions, Moved] | None = None
    changes_tried: int = 0
    cut: bool = False
    least_bytes: int | None = None
    known: tuple[Program, ...] = ()
    stats: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.table = RunTable(self.graph, self.allowed)

    @cached_property
    def mover(self) -> Mover:
        """Make the mover, which makes runs fit the budget."""
        least_bytes = self.least_bytes or least_moved(self.graph, self.small[0])
        return Mover(self.table, self.limit_bytes, self.device, self.host_bytes, least_bytes)

    def solution(self, members: Sequence[Member]) -> Solution:
        """Plan, and return the solution with its proof."""
        begin_s = time.monotonic()
        self.small.append(stored(self.graph))
        self.offer(self.small[0], "store-all")
        # What is found must be made a program, validated and replayed.
        stored_s = time.monotonic() - begin_s
        checks_s = max(CHECKS * stored_s, ALL_CHECKS * stored_s - GRACE_S)
        self.deadline.at_s -= min(checks_s, MOST_CHECKS * self.deadline.left_s)
        for program in self.known:
            self.offer(program, "known")
            self._seed(program)
        if self.budget_bytes is None:
            self._unlimited()
        possible = memory_lower_bound(self.graph) <= self.limit_bytes
        if not self.done and possible and not self._deep(members):
            self._begin()
            self._relax()
            movers, chains = (
                [member for member in members if member.strategy.name in names]
                for names in (MOVERS, CHAINS)
            )
            if not self.done:
                if not self.moving_wins:
                    # First, since what it learns about stages also serves the larger budgets.
                    self._start([member for member in chains if not self.near])
                self._sweep()
                self._start([member for member in movers if not self._beats_moving])
                self._descend()
            if not self.near:
                self._start([member for member in members if member not in (*movers, *chains)])
                self._descend()
                self._anneal()
        if self.best is None:
            least = self._least()
            self.offer(least, "least memory")
            if self.best is None:
                return self._without_plan(least)
        program, _, source = self.best
        return self._with_plan(program, source)

    def _unlimited(self) -> None:
        """Plan without a budget: nothing need move."""
        program, exact = fastest_program(self.graph, self.allowed)
        self.offer(program, "no limit")
        if exact:
            self.raise_bound(self.best_s)

    def _deep(self, members: Sequence[Member]) -> bool:
        """Plan by way of a folded step, if there are many equal layers; tell whether it found
        one."""
        layers = RepeatedLayers.of(self.graph)
        if layers is None or len(layers.core) < DEEP:
            return False

        def plan(
            graph: Graph, budget_bytes: int, deadline: Deadline, known: list[Decisions]
        ) -> Planned:
            folded = JointPlanning(
                graph,
                budget_bytes,
                self.device,
                self.host_bytes * len(graph.operators) / len(self.graph.operators),
                deadline,
                self.gap,
                allowed=self.allowed,
                changes=self.changes,
                seed=self.seed,
            )
            folded.runs = [at.runs for at in known]
            targets = [Target.of(member.strategy, graph) for member in members]
            folded.solution([Member(target) for target in targets])
            self.stats.setdefault("starts", folded.stats.get("starts", ()))
            self.changes_tried += folded.changes_tried
            return folded.mover, folded.decided()

        folding = folded_into(layers, GROUPS)
        self.least_bytes = least_moved(folding.graph, stored(folding.graph))
        large_bytes = least_moved(self.graph, self.small[0])
        deep = DeepPlanning(folding, self.mover, self.deadline, plan, self.bound_s, large_bytes)
        self.raise_bound(deep.relaxed_bound_s())
        deep.bound_s = self.bound_s
        for moved in deep.found():
            self.offer(self.mover.program(moved), "equal layers")
        self.changes_tried += deep.changes_tried
        self.stats["equal_layers"] = len(layers.core)
        self.stats["folded_cpu_s"] = deep.folded_cpu_s
        return self.best is not None

    def decided(self) -> list[Decisions]:
        """Return the best decisions of the local search, and the runs of the best program."""
        found = [] if self.decisions is None else [self.decisions[0]]
        if self.best is not None:
            with suppress(KeyError):
                found.append(self._local_search().start(self.table.runs_of(self.best[0])))
        return found

    @property
    def _beats_moving(self) -> bool:
        """Tell whether the best plan is as fast as any plan can be that runs nothing twice."""
        if self.best is None or not self.host_bytes:
            return False
        least_s = graph_problem(self.graph, self.device).lower_bound_s(self.limit_bytes)
        return self.best[1] <= least_s

    def _start(self, members: Sequence[Member]) -> None:
        """Get plans of single strategies, within their share of the time."""
        until = self.deadline.within(START_SHARE * self.deadline.left_s)
        lines = list(self.stats.get("starts", ()))  # type: ignore[call-overload]  # a tuple
        for number, member in enumerate(members):
            name = member.strategy.name
            if self.done or self.deadline.passed(0.05, f"joint: {name}"):
                break
            share_s = until.left_s / (len(members) - number)
            if self.best is not None and share_s < BEGIN_S * len(self.graph.operators):
                continue
            try:
                found = member.run(self.budget_bytes, self.device, share_s, self.deadline.progress)
            except KeyboardInterrupt:
                self.deadline.over = True
                break
            lines.append(found.line)
            if found.solution.program is not None:
                self.offer(found.solution.program, name)
                self._seed(found.solution.program)
            elif found.solution.smallest is not None and found.solution.smallest.program:
                self.small.append(found.solution.smallest.program)
                self._seed(found.solution.smallest.program)
        self.stats["starts"] = tuple(lines)

    def _seed(self, program: Program) -> None:
        """Keep a program's runs for the local search."""
        with suppress(KeyError):  # of implementations that may not be chosen here
            self.runs.append(self.table.runs_of(program))

    def _begin(self) -> None:
        """Descend for a while from rotor's programs within larger budgets, which the mover makes
        fit by transfers: a good plan early on, however long the rest takes."""
        if self.deadline.passed(0.1, "joint: larger budgets"):
            return
        until = self.deadline.within(FIRST_SHARE * self.deadline.left_s)
        more = rotor_programs_above(self.graph, self.small[0], self.limit_bytes, until)
        for program in (self.small[0], *more):
            self._seed(program)
        known, until = self._distinct(), self.deadline.within(FIRST_SHARE * self.deadline.left_s)
        if known and not self.near:
            self.runs = [moved.runs for moved in known[1:]]
            self._descent(self._local_search().start(known[0].runs), until, FIRST_CHANGES)

    def _relax(self) -> None:
        """Solve the relaxation: a bound, and programs close to it."""
        if self.deadline.passed(0.3, "joint: relaxation"):
            return
        search = LinkedSearch(
            self.graph,
            self.allowed,
            self.limit_bytes,
            self.deadline.within(RELAXATION_SHARE * self.deadline.left_s),
            mover=self.mover,
            least_bytes=self.mover.least_bytes,
        )
        search.run()
        self.raise_bound(search.bound_s)
        self.infeasible = search.infeasible
        self.stats["relaxation_rounds"] = search.rounds
        self.runs = [*search.found, *self.runs]
        self.relaxed = frozenset(self.mover.used(runs).tobytes() for runs in search.found)
        if search.best.program is not None:
            self.offer(search.best.program, "relaxation")

    def _sweep(self) -> None:
        """Offer rotor-menus' schedules within larger budgets; the mover makes them fit."""
        if self.near or self.deadline.passed(0.5, "joint: larger budgets"):
            return
        link, seconds = self.device if self.host_bytes else None, SWEEP_SHARE * self.deadline.left_s
        limits = self.limit_bytes, link, self.deadline.within(seconds)
        for order in stage_orders_above(self.graph, self.small[0], *limits, self.allowed):
            moved = self.mover.moved(self.table.runs_of(order))
            self.runs.append(moved.runs)
            if moved.time_s < (self.best_s if moved.moves else self.recomputed_s):
                self.offer(self.mover.program(moved), "stages")

    def _descend(self) -> None:
        """Descend from the fastest of the runs known."""
        known = self._distinct()
        self.runs = []
        if known and self.best is None:
            self.offer(self.mover.program(known[0]), "starts")
        until = self.deadline.within(DESCENT_SHARE * self.deadline.left_s)
        known = self._mixed(known)[:DESCENTS]
        starts = [self._local_search().start(moved.runs) for moved in known]
        payback = Payback() if self.pays else None
        if self.cut and self.decisions is not None:
            # The fastest start may pass the first descent's plan; the better of both goes on.
            for at in starts[:1]:
                if not self.deadline.passed(0.6, "joint: descents"):
                    self._descent(at, until, payback=payback)
            starts[:1] = [self.decisions[0]]
        for number, at in enumerate(starts):
            if payback is not None and payback.over:
                break
            if (until.left_s or not number) and not self.deadline.passed(0.6, "joint: descents"):
                self._descent(at, self.deadline, payback=payback)

    def _descent(
        self,
        at: Decisions,
        until: Deadline,
        most: int | None = None,
        payback: Payback | None = None,
    ) -> None:
        """Descend from decisions, by at most so many changes."""
        search = LocalSearch(
            self.mover, until, self.bound_s, self.seed, most, self.near_gap, payback
        )
        search.descend(at)
        self._finish(search)
        self.cut = until.over or search.tried == most
        self.deadline.over |= until.over and until.left_s > 0  # interrupted

    def _distinct(self) -> list[Moved]:
        """Return the known runs that fit, each once, without unread runs; the fastest first."""
        found: dict[bytes, Moved] = {}
        fits = False
        for runs in self.runs:
            if fits and self.deadline.passed(0.6, "joint: starts"):
                break
            moved = self.mover.moved(runs)
            found[moved.runs.tobytes()], fits = moved, fits or moved.fits
        return sorted((one for one in found.values() if one.fits), key=lambda one: one.time_s)

    def _mixed(self, known: list[Moved]) -> list[Moved]:
        """Put the fastest runs of the relaxation second: they lead elsewhere than those of chains,
        which are faster to begin with."""
        relaxed = next((one for one in known[1:] if one.runs.tobytes() in self.relaxed), None)
        if relaxed is None or known[0].runs.tobytes() in self.relaxed:
            return known
        return [known[0], relaxed, *(one for one in known[1:] if one is not relaxed)]

    def _anneal(self) -> None:
        """Anneal from the best decisions of the local search, and again from the result."""
        count = len(self.graph.operators)
        most = max(CHANGES_EACH, count) * count
        for number, hot, until in annealings(
            self.deadline, self.began_s if self.pays else None, lambda: self.best_s
        ):
            over = self.near or self.deadline.passed(0.7, "joint: local search")
            if self.decisions is None or over:
                return
            search = self._local_search(number)
            search.deadline = until
            search.anneal(self.decisions[0], min(self.changes, most), hot)
            self._finish(search)
            self.deadline.over |= until.over and until.left_s > 0  # interrupted

    def _local_search(self, number: int = 0) -> LocalSearch:
        seed = self.seed + number
        return LocalSearch(self.mover, self.deadline, self.bound_s, seed, gap=self.near_gap)

    def _finish(self, search: LocalSearch) -> None:
        """Take over the best program of a finished local search."""
        self.changes_tried += search.tried
        if search.best is None:
            return
        self.offer(self.mover.program(search.finished()), "local search")
        if self.decisions is None or search.time_s < self.decisions[1].time_s:
            self.decisions = search.best

    def _least(self) -> Program:
        """Return the program of least memory known."""
        programs = [*self.small, *programs_of_chain(self.graph, [1], self.deadline)]
        for program in programs[1:]:
            self._seed(program)
        starts = [self.table.runs_of(self.small[0]), *self.runs]
        runs, least_bytes = least_memory(self.mover, starts, self.deadline)
        found = program_within(self.mover, runs, max(least_bytes, self.limit_bytes))
        return smaller(self.mover, [found, *programs])

    def _with_plan(self, program: Program, source: str) -> Solution:
        timeline = replay(self.graph, program, self.device)
        stats = {
            "source": source,
            **self.stats,
            "changes_tried": self.changes_tried,
            "stall_s": timeline.total_stall_s,
            "host_peak_bytes": timeline.host_peak_bytes,
            "solve_s": time.monotonic() - self.began_s,
        }
        return solution_of(program, timeline, self.bound_s, PROVED, stats)

    def _without_plan(self, least: Program) -> Solution:
        """Return the smallest budget known, and whether a smaller one is proved impossible."""
        proved = memory_lower_bound(self.graph) > self.limit_bytes
        self.bound_s = time_lower_bound(self.graph)
        named = self._with_plan(least, "least memory")
        return Solution(
            Status.INFEASIBLE if proved else Status.UNKNOWN,
            smallest_budget_bytes=named.peak_bytes,
            smallest=named,
            stats=self.stats,
        )
