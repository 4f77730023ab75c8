"""joint: recompute, move to the host and choose implementations in one plan, with a bound."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from memopt.models.checks import check_bytes
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.programs.instructions import Program
from memopt.programs.solution import Solution
from memopt.reductions.stage_map import has_updates
from memopt.solvers.running import Deadline
from memopt.strategies.base import CostModel, Features, Improver, Progress, Strategy
from memopt.strategies.joint.planning import JointPlanning
from memopt.strategies.monet.rotor_menus import RotorMenus
from memopt.strategies.monet.strategy import Monet
from memopt.strategies.moving.on_host import without_host_updates
from memopt.strategies.moving.planning import Limits, planned_moves
from memopt.strategies.offload.graph import OffloadGraph
from memopt.strategies.shared.chain_programs import programs_of_step
from memopt.strategies.shared.members import Member
from memopt.strategies.target import Target

DEFAULT_TIME_LIMIT_S = 60.0
SOLVED_EXACTLY = 96
"""The most operators for which MONeT's programs are a start, too."""
OFFLOAD_SHARE = 0.4
"""Share of a whole step's time for offload-graph."""


@dataclass(frozen=True)
class Joint(Improver):
    """Recomputes, moves tensors to the host and chooses implementations, all in one plan.

    Starts from a relaxation of all decisions together, which also gives the bound (`LinkedModel`),
    from rotor's and rotor-menus' programs within larger budgets, from offload-graph's plan (which
    has dynprog's and greedy's) where moving alone may win, and from that of rotor-menus (which has
    rotor's), for small graphs monet's too: it is never slower than they are in the time they had. A
    local search over the replay does the rest, many equal layers at once. Without a link of known
    speed nothing moves.

    Attributes:
        host_budget_bytes: the most that may be on the host at once; None: no limit.
        exact_only: leave out implementations that change rounding.
        changes: how many changes each of the local search's annealings may try.
        seed: the local search's.
        gap: share of the bound by which the plan may be slower where the search ends.
        pays: end where further seconds would not come back in 500 steps of training.
    """

    host_budget_bytes: int | None = None
    exact_only: bool = True
    changes: int = 20_000
    seed: int = 0
    gap: float = 0.0
    pays: bool = False

    name: ClassVar[str] = "joint"
    needs: ClassVar[str] = "graph"
    features: ClassVar[Features] = Features(
        recompute=True, offload=True, implementations=True, host_updates=True
    )
    references: ClassVar[tuple[str, ...]] = (
        *OffloadGraph.references,
        *Monet.references,
    )

    def __post_init__(self) -> None:
        check_bytes("Joint", changes=self.changes)
        if self.host_budget_bytes is not None:
            check_bytes("Joint", host_budget_bytes=self.host_budget_bytes)

    def only_exact_implementations(self) -> bool | None:
        return self.exact_only

    def solve_from(
        self,
        known: Sequence[Program],
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        graph, begin = self.taken(cost_model, Graph), time.monotonic()
        limit_s = DEFAULT_TIME_LIMIT_S if time_limit_s is None else time_limit_s
        linked = device is not None and device.is_linked and self.host_budget_bytes != 0
        host_bytes = math.inf if self.host_budget_bytes is None else float(self.host_budget_bytes)
        deadline = Deadline(begin + limit_s, progress)
        if has_updates(graph):
            return self._moved(graph, budget_bytes, host_bytes, device or Device(), deadline)
        planning = JointPlanning(
            graph,
            budget_bytes,
            device or Device(),
            host_bytes if linked else 0.0,
            deadline,
            self.gap,
            self.pays,
            allowed=RotorMenus(exact_only=self.exact_only).allowed,
            changes=self.changes,
            seed=self.seed,
            known=tuple(known),
        )
        return planning.solution(self.starts(graph, linked))

    def starts(self, graph: Graph, linked: bool) -> tuple[Member, ...]:
        """Return the strategies that plans start from and that can plan the graph."""
        strategies: list[Strategy] = [RotorMenus(exact_only=self.exact_only)]
        if linked:
            strategies.append(OffloadGraph(self.host_budget_bytes))
        if len(graph.operators) <= SOLVED_EXACTLY:
            strategies.append(Monet(exact_only=self.exact_only))
        targets = [Target.of(strategy, graph) for strategy in strategies]
        return tuple(Member(target) for target in targets if target.why_not() is None)

    def _moved(
        self,
        graph: Graph,
        budget_bytes: int | None,
        host_bytes: float,
        device: Device,
        deadline: Deadline,
    ) -> Solution:
        """Return the faster of offload-graph's plan of a whole step and Rotor's programs with their
        parameters moved."""
        mover = OffloadGraph(self.host_budget_bytes, exact_only=self.exact_only)
        limit_s = None if math.isinf(deadline.left_s) else OFFLOAD_SHARE * deadline.left_s
        moved = mover.solve(
            graph, budget_bytes, device=device, time_limit_s=limit_s, progress=deadline.progress
        )
        if budget_bytes is None:
            return moved
        limits = Limits(budget_bytes, host_bytes, deadline)
        bases = (("rotor", program) for program in programs_of_step(graph, budget_bytes))
        graph = without_host_updates(graph, inexact_only=True) if self.exact_only else graph
        first = next(bases, None)
        if first is None:
            return moved
        return planned_moves(
            graph, device, limits, itertools.chain([first], bases), self.name, moved
        )
