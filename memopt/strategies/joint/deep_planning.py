"""Plans steps of many equal layers: the bound by groups of layers, plans by way of a folded step.

The slow parts (the relaxation, single strategies' plans, local search) work on the folded step,
whose size does not depend on the number of layers. The whole step only judges unfolded plans.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from memopt.models.bounds import memory_lower_bound
from memopt.models.graph import Graph
from memopt.solvers.running import Deadline, Solver, SolverOptions
from memopt.strategies.joint.aggregation import AggregatedModel
from memopt.strategies.joint.equal_layers import RepeatedLayers
from memopt.strategies.joint.folding import Folding, Unfolding, even_groups
from memopt.strategies.joint.local_search import LocalSearch
from memopt.strategies.joint.moved import Moved, Mover
from memopt.strategies.joint.neighbours import Decisions
from memopt.strategies.shared.timing import TIMINGS

GROUPS, BOUND_GROUPS = 8, 12
"""Groups of equal layers, in the step that is planned and in the relaxation."""
DEEP = 32
"""The least number of equal layers for which a step is folded."""
ROOMS = (0.85, 0.75, 0.65, 0.95, 0.5)
"""Memory tried beyond what every plan needs, as shares of the layers' part of the room."""
PLANS = 3
"""The most folded plans that fit when unfolded."""
PLAN_SHARE = 0.28
"""Share of the time left for one folded plan."""
CHANGES = 1500
"""The most changes of folded decisions that the whole step judges after each folded plan."""
REACHES = (1, 0, GROUPS)
RELAXATION_SHARE, RELAXATION_GAP = 0.2, 1e-3
GOOD = 0.01
"""Gap at which no further folded plan is made."""


def folded_into(layers: RepeatedLayers, groups: int) -> Folding:
    """Divide equal layers into so many groups."""
    return Folding(layers, even_groups(len(layers.core), groups))


Planned = tuple[Mover, list[Decisions]]
"""A folded step's mover, and the decisions made with it."""


@dataclass(eq=False)
class FoldedSearch(LocalSearch):
    """Searches the decisions of a folded step; `mover` belongs to that step, at any budget."""

    unfolding: Unfolding = field(kw_only=True)
    judge: Mover = field(kw_only=True)

    def judged(self, at: Decisions, most_s: float = math.inf) -> Moved:
        self.tried += 1
        whole = self.unfolding.decisions(at)
        moved = self.judge.moved(whole.runs, whole.stays, TIMINGS[:1], whole.first, most_s)
        events = moved.events
        if events is not None:
            events = events.copy()
            events[:, 2] = self.unfolding.image[events[:, 2]]
        found = replace(moved, runs=self.mover.used(at.runs), events=events)
        if moved.time_s < self.time_s:
            self.best = Decisions(found.runs, at.stays, at.first), found
        return found

    def whole(self) -> Decisions:
        """Return the best decisions as the whole step's."""
        assert self.best is not None
        return self.unfolding.decisions(self.best[0])


@dataclass(eq=False)
class DeepPlanning:
    """The planning of one budget of a step of many equal layers.

    Attributes:
        folding: to the step that is planned instead of the whole one.
        mover: of the whole step and its budget.
        deadline: of the whole solve.
        plan: plans a folded step within a budget until a deadline, given decisions found before.
        bound_s: a lower bound on every program's time.
        large_bytes: tensors smaller than this may stay unmoved, where that is faster.
    """

    folding: Folding
    mover: Mover
    deadline: Deadline
    plan: Callable[[Graph, int, Deadline, list[Decisions]], Planned]
    bound_s: float
    large_bytes: int
    changes_tried: int = field(default=0, init=False)
    folded_cpu_s: float = field(default=0.0, init=False)
    """Processor time spent on the folded step and on the relaxation."""

    @cached_property
    def budgets(self) -> list[int]:
        """Return budgets of the folded step: its fixed need, plus shares of the room per layer."""
        layers, folded = self.folding.layers, self.folding.graph
        whole, count = layers.graph, layers.forward.count
        least_bytes = memory_lower_bound(folded)
        room = self.mover.budget_bytes - memory_lower_bound(whole)
        left = count - len(layers.core) + len(self.folding.groups)
        return [least_bytes + int(share * room * left / count) for share in ROOMS]

    def relaxed_bound_s(self) -> float:
        """Return the bound by groups of layers, seconds; 0 where the solver has none."""
        begin = time.process_time()
        folding = folded_into(self.folding.layers, BOUND_GROUPS)
        table = self.mover.table
        built = AggregatedModel(
            folding.graph,
            table.allowed,
            device=self.mover.device,
            least_bytes=self.mover.least_bytes,
            folding=folding,
        )
        options = SolverOptions(
            Solver.HIGHS,
            time_limit_s=RELAXATION_SHARE * self.deadline.left_s,
            progress=self.deadline.progress,
            gap=RELAXATION_GAP,
        )
        room = self.mover.budget_bytes - table.graph.resident_bytes
        bound_s = built.model.solve(room, options).bound
        self.folded_cpu_s += time.process_time() - begin
        return bound_s

    def found(self) -> Iterator[Moved]:
        """Yield runs of the whole step with transfers, from one folded plan after the other."""
        best_s, plans, known = math.inf, 0, list[Decisions]()
        for budget_bytes in self.budgets:
            over = self.deadline.passed(0.5, f"joint: folded step, {best_s:.6g} s")
            if over or plans >= PLANS or best_s <= self.bound_s * (1 + GOOD):
                return
            until = self.deadline.within(PLAN_SHARE * self.deadline.left_s)
            begin = time.process_time()
            folded, known = self.plan(self.folding.graph, budget_bytes, until, known)
            self.folded_cpu_s += time.process_time() - begin
            begun = self._begun(folded, known)
            if begun is not None:
                plans += 1
                moved = self._finished(*begun)
                best_s = min(best_s, moved.time_s)
                yield moved

    def _begun(
        self, folded: Mover, decided: list[Decisions]
    ) -> tuple[FoldedSearch, Decisions] | None:
        """Start a search at the decisions whose unfolded runs are fastest; None if none fit."""
        best: tuple[FoldedSearch, Decisions] | None = None
        judges = self.mover, replace(self.mover, least_bytes=self.large_bytes)
        for at, reach, judge in product(decided, REACHES, judges):
            unfolding = Unfolding(self.folding, folded.table, judge.table, reach)
            search = FoldedSearch(
                folded, self.deadline, self.bound_s, most=CHANGES, unfolding=unfolding, judge=judge
            )
            search.judged(at)
            if search.best and (best is None or search.time_s < best[0].time_s):
                best = search, at
        return best

    def _finished(self, search: FoldedSearch, at: Decisions) -> Moved:
        """Descend by changes of groups of layers, then by those of the whole step."""
        search.descend(at)
        whole = LocalSearch(search.judge, self.deadline, self.bound_s, most=CHANGES)
        whole.descend(search.whole())
        self.changes_tried += search.tried + whole.tried
        return whole.finished()
