"""OLLA as a strategy: order the whole step, then place every tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.passes.cp_sat import CpSat, Improvement
from memopt.passes.joint_pass import order_and_place_together
from memopt.passes.order.ordering import DEFAULT_STATES
from memopt.passes.passes import (
    order_in_any_place,
    order_program,
    place_program,
    placing_figures,
)
from memopt.passes.place.placement import DEFAULT_WORK_LIMIT
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.strategies.base import CostModel, Features, Progress, Strategy


@dataclass(frozen=True)
class Olla(Strategy):
    """Less memory at no extra time: reorders operators and packs their tensors.

    Nothing is recomputed or moved (OLLA §3-4).

    It minimises the peak whatever the budget; OPTIMAL means that order and placement are both
    proved to be (each on its own, OLLA §4.4).

    Attributes:
        order: look for an order of operators (eq. 14); else keep the framework's.
        in_place: let an elementwise output take over the storage of an argument that nothing else
            reads, as eager's `relu_` does; else every tensor has a storage of its own.
        place: look for addresses (eq. 15).
        arena_cost: the most that addresses may add to the peak, as a share of what moves of it:
            lifetimes that would cost more are left to the allocator. None: whatever they cost.
        alignment: of every address, bytes; 1: none.
        place_results: whether outputs and gradients get addresses, too.
        seed: of the placement's random restarts, and of CP-SAT.
        max_states: limit of the exact searches for an order.
        work_limit: limit of the search for addresses.
        solver: "search"; or "cp-sat", by which OLLA's own programs (eq. 14 and 15) are solved where
            the search leaves a gap.
        joint: with CP-SAT, also order and addresses in one program (eq. 9), practical for small
            steps. Every tensor gets an address, whatever `arena_cost`, if the budget allows it.
        warm_start: CP-SAT begins from what the search finds, and with its bounds; else from the
            framework's order and greedy addresses.
        effort: limit of each of CP-SAT's programs, in its deterministic time, of which one is a few
            seconds.
        num_workers: threads of CP-SAT; with one, the same problem gives the same plan.
    """

    order: bool = True
    place: bool = True
    in_place: bool = True
    arena_cost: float | None = 0.02
    alignment: int = 1
    place_results: bool = True
    seed: int = 0
    max_states: int = DEFAULT_STATES
    work_limit: int = DEFAULT_WORK_LIMIT
    solver: str = "search"
    joint: bool = False
    warm_start: bool = True
    effort: float = 60.0
    num_workers: int = 1

    name: ClassVar[str] = "olla"
    needs: ClassVar[str] = "graph"
    features: ClassVar[Features] = Features(order=True, place=True)
    decides_in_place: ClassVar[bool] = True
    references: ClassVar[tuple[str, ...]] = (
        "Steiner, Elhoushi, Kahn, Hegarty: OLLA: Optimizing the Lifetime and Location of Arrays "
        "to Reduce the Memory Usage of Neural Networks, 2022",
        "Moffitt: MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine "
        "Learning, ASPLOS 2023",
    )

    def __post_init__(self) -> None:
        if self.alignment < 1:
            raise ValueError(f"Olla: alignment must be at least 1 byte, got {self.alignment}")
        if self.arena_cost is not None and self.arena_cost < 0:
            raise ValueError(f"Olla: arena_cost must be at least 0, got {self.arena_cost}")
        if self.num_workers < 1:
            raise ValueError(f"Olla: num_workers must be at least 1, got {self.num_workers}")
        if not self.effort > 0:
            raise ValueError(f"Olla: effort must be above 0, got {self.effort}")
        if self.solver not in ("search", "cp-sat"):
            raise ValueError(f'Olla: solver must be "search" or "cp-sat", got {self.solver!r}')
        if self.joint and not (self.solver == "cp-sat" and self.order and self.place):
            raise ValueError('Olla: joint=True needs solver="cp-sat", order=True and place=True')

    @property
    def cp_sat(self) -> CpSat | None:
        """Return how CP-SAT solves; None: it is not asked."""
        if self.solver == "search":
            return None
        return CpSat(
            workers=self.num_workers,
            seed=self.seed,
            warm_start=self.warm_start,
            effort=self.effort,
        )

    def solve(
        self,
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        assert isinstance(cost_model, Graph)
        graph = cost_model
        program = store_all(graph)
        if self.in_place:
            program = with_in_place(graph, program)
        share_s = None
        if time_limit_s is not None:
            share_s = time_limit_s / (1 + (self.order and self.place) + self.joint)
        stats: dict[str, object] = {"framework_peak_bytes": replay(graph, program).peak_bytes}
        proved = True
        if self.order:
            program, proved = self._order(graph, program, share_s, progress, stats)
            if stats["order_interrupted"]:
                share_s = 0.0
            if self.in_place and budget_bytes is not None and proved:
                program, proved = self._order_anew(graph, program, budget_bytes, share_s)
        if self.joint:
            found = self._joint(graph, program, budget_bytes, share_s, progress, stats)
            if found is not None:
                return _solution(graph, *found, device, stats)
        unplaced_bytes = peak_bytes = replay(graph, program).peak_bytes
        if self.place and (budget_bytes is None or unplaced_bytes <= budget_bytes):
            limit_bytes = self._limit_bytes(graph, unplaced_bytes, budget_bytes)
            program, placement_proved = self._place(
                graph, program, limit_bytes, share_s, progress, stats
            )
            proved = proved and placement_proved
            peak_bytes = replay(graph, program).placed_peak_bytes or unplaced_bytes
            stats["placed"] = program.offsets is not None
        if budget_bytes is None or peak_bytes <= budget_bytes:
            return _solution(graph, program, peak_bytes, proved, device, stats)
        return Solution(
            Status.INFEASIBLE if proved else Status.UNKNOWN,
            smallest_budget_bytes=peak_bytes,
            smallest=_solution(graph, program, peak_bytes, False, device, stats),
            stats=stats,
        )

    def _order(
        self,
        graph: Graph,
        program: Program,
        time_limit_s: float | None,
        progress: Progress | None,
        stats: dict[str, object],
    ) -> tuple[Program, bool]:
        """Return (the program reordered, whether its order is proved best)."""
        ordered, ordering = order_program(
            graph,
            program,
            time_limit_s=time_limit_s,
            max_states=self.max_states,
            cp_sat=self.cp_sat,
            on_improvement=_listener(progress, 0.0, "ordering"),
        )
        stats |= {f"order_{key}": value for key, value in ordering.stats.items()}
        stats |= {"order_bound_bytes": ordering.bound, "order_gap": ordering.gap}
        return ordered, ordering.status is Status.OPTIMAL

    def _order_anew(
        self, graph: Graph, program: Program, budget_bytes: int, time_limit_s: float | None
    ) -> tuple[Program, bool]:
        """Order a program anew whose best order is over the budget, with other in-place outputs.
        Return (the program of the smaller peak, whether the outcome is proved)."""
        peak_bytes = replay(graph, program).peak_bytes
        if peak_bytes <= budget_bytes:
            return program, True
        other, bound = order_in_any_place(
            graph,
            store_all(graph),
            good_enough=budget_bytes,
            time_limit_s=time_limit_s,
            max_states=self.max_states,
        )
        other_bytes = replay(graph, other).peak_bytes
        if other_bytes < peak_bytes:
            program, peak_bytes = other, other_bytes
        return program, bound >= peak_bytes or bound > budget_bytes

    def _joint(
        self,
        graph: Graph,
        program: Program,
        budget_bytes: int | None,
        time_limit_s: float | None,
        progress: Progress | None,
        stats: dict[str, object],
    ) -> tuple[Program, int, bool] | None:
        """Order and place in one program; return (program, its peak, whether it is proved), or None
        where not all addresses are within the budget."""
        bound_bytes, how = stats["order_bound_bytes"], self.cp_sat
        assert isinstance(bound_bytes, int)
        assert how is not None
        made, bound_bytes, figures = order_and_place_together(
            graph,
            program,
            how,
            bound_bytes=bound_bytes,
            alignment=self.alignment,
            place_results=self.place_results,
            time_limit_s=time_limit_s,
            work_limit=self.work_limit,
            on_improvement=_listener(progress, 0.5, "joint"),
        )
        stats |= {f"joint_{key}": value for key, value in figures.items()}
        stats |= {"joint_bound_bytes": bound_bytes}
        peak_bytes = replay(graph, made).placed_peak_bytes
        if peak_bytes is None or (budget_bytes is not None and peak_bytes > budget_bytes):
            return None
        stats |= {"placed": True}
        return made, peak_bytes, peak_bytes <= bound_bytes

    def _limit_bytes(
        self, graph: Graph, unplaced_bytes: int, budget_bytes: int | None
    ) -> int | None:
        """Return the limit on the arena and the memory outside it."""
        if self.arena_cost is None:
            return budget_bytes
        cost_bytes = int(self.arena_cost * (unplaced_bytes - graph.resident_bytes))
        limit_bytes = unplaced_bytes + cost_bytes
        return limit_bytes if budget_bytes is None else min(limit_bytes, budget_bytes)

    def _place(
        self,
        graph: Graph,
        program: Program,
        limit_bytes: int | None,
        time_limit_s: float | None,
        progress: Progress | None,
        stats: dict[str, object],
    ) -> tuple[Program, bool]:
        """Return (the program with offsets if any are within the limit, whether the arena is proved
        to be as small as possible)."""
        placed, placement = place_program(
            graph,
            program,
            alignment=self.alignment,
            place_results=self.place_results,
            limit_bytes=limit_bytes,
            time_limit_s=time_limit_s,
            work_limit=self.work_limit if self.warm_start else 0,
            seed=self.seed,
            cp_sat=self.cp_sat,
            on_improvement=_listener(progress, 0.5, "placing"),
        )
        stats |= {f"place_{key}": value for key, value in placement.stats.items()}
        stats |= placing_figures(graph, placed, placement)
        return placed, placement.status is Status.OPTIMAL


def _solution(
    graph: Graph,
    program: Program,
    peak_bytes: int,
    proved: bool,
    device: Device | None,
    stats: dict[str, object],
) -> Solution:
    return Solution(
        Status.OPTIMAL if proved else Status.FEASIBLE,
        program=program,
        peak_bytes=peak_bytes,
        time_s=replay(graph, program, device).time_s,
        lower_bound_s=graph.compute_time_s,
        gap=0.0,
        stats=stats,
    )


def _listener(progress: Progress | None, fraction: float, what: str) -> Improvement | None:
    """Pass improvements on to `progress`."""
    if progress is None:
        return None
    return lambda _seconds, peak, bound: progress(fraction, f"{what}: {peak} bytes, bound {bound}")
