"""MONeT as a strategy on a coarsened graph."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from memopt.models.graph import Graph, Implementation, Operator
from memopt.programs.instructions import Program
from memopt.reductions.linearize import linearize
from memopt.reductions.stage_map import has_updates
from memopt.solvers.running import Deadline
from memopt.strategies.base import Features
from memopt.strategies.monet.checkmate import CheckmateModel
from memopt.strategies.monet.graph_strategy import SolvedExactly
from memopt.strategies.monet.ilp import MonetModel
from memopt.strategies.monet.intervals import search_windows
from memopt.strategies.shared.alternatives_table import SLOTS, AlternativesTable
from memopt.strategies.shared.incumbent import Incumbent
from memopt.strategies.shared.kernel_choice import fastest_kernels
from memopt.strategies.shared.time_point_search import CLOSE, TimePointSearch

RELAXATION_SHARE = 0.4

MONET_PAPER = (
    "Shah, Wu, Mohan, Chidambaram, Krähenbühl: Memory Optimization for Deep Networks, 2021"
)


class Choices(StrEnum):
    """Implementations that the solver may choose (MONeT figure 4's ablation)."""

    NONE = "none"
    CONV = "conv"
    OUTPUT = "output"
    INTERMEDIATE = "intermediate"
    ALL = "all"


@dataclass(frozen=True)
class Monet(SolvedExactly):
    """Recomputes any operators and chooses lighter implementations, solved exactly; minutes.

    Both are chosen together (MONeT).

    Attributes:
        choices: which implementations may be chosen, for the ablation.
    """

    choices: Choices = Choices.ALL

    name: ClassVar[str] = "monet"
    features: ClassVar[Features] = Features(recompute=True, implementations=True)
    references: ClassVar[tuple[str, ...]] = (MONET_PAPER,)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "choices", Choices(self.choices))

    def allowed(self, operator: Operator, name: str) -> bool:
        """Tell whether the solver may run `operator` by its implementation `name`.

        This depends on the dependences it changes: none (algorithms of a convolution), tensors of
        its own (intermediate-activated), or other operands.
        """
        choice = next(c for c in operator.implementations if c.name == name)
        if self.exact_only and not choice.exact:
            return False
        if self.choices is Choices.ALL:
            return True
        if self.choices is Choices.NONE:
            return False
        return _kind(operator, choice) is self.choices

    def model(self, graph: Graph) -> MonetModel | CheckmateModel:
        """Build the program of a graph under these choices. Without a backward it is Checkmate's,
        whose stages are those of all operators."""
        return CheckmateModel(graph) if graph.is_forward else MonetModel(graph, self.allowed)

    def as_they_are(self, graph: Graph) -> bool:
        return not any(
            self.allowed(operator, choice.name)
            for operator in graph.operators
            for choice in operator.implementations
        )

    def polish(self, graph: Graph, program: Program, budget_bytes: int | None) -> Program:
        if self.choices in (Choices.ALL, Choices.CONV):
            return fastest_kernels(graph, program, budget_bytes)
        return program

    def whole(
        self, best: Incumbent, budget_bytes: int, deadline: Deadline, stats: dict[str, object]
    ) -> float | None:
        graph = best.graph
        until = deadline.within(RELAXATION_SHARE * deadline.left_s)
        search = TimePointSearch(graph, self.allowed, budget_bytes, until).run()
        stats["relaxation_rounds"] = search.rounds
        stats["relaxation_infeasible"] = search.infeasible
        if search.best.program is not None:
            best.offer(search.best.program, "relaxation")
        if not best.near(search.bound_s, CLOSE) and not has_updates(graph):
            view = linearize(graph)
            table = AlternativesTable(view, budget_bytes, SLOTS, deadline, self.allowed)
            found = table.best(budget_bytes)[0] if table.complete else None
            if found is not None:
                best.offer(found, "rotor-menus")
        if best.program is not None and not best.near(search.bound_s, CLOSE):
            stats["windows"] = search_windows(
                best, self.allowed, budget_bytes, deadline, search.bound_s
            )
        if best.source in ("relaxation", "rotor-menus", "windows"):
            stats["whole"] = best.source
        return search.bound_s or None

    def bound(self, graph: Graph, budget_bytes: int, deadline: Deadline) -> float | None:
        return TimePointSearch(graph, self.allowed, budget_bytes, deadline).run().bound_s


def _kind(operator: Operator, choice: Implementation) -> Choices:
    """Tell which of the ablation's options an implementation belongs to."""
    if "convolution" in operator.target:
        # One gradient alone counts as another algorithm, whatever it reads.
        return Choices.CONV
    if choice.packed:
        return Choices.INTERMEDIATE
    reads = operator.reads if choice.reads is None else choice.reads
    writes = operator.writes if choice.writes is None else choice.writes
    if set(writes) != set(operator.writes):
        return Choices.INTERMEDIATE
    return Choices.CONV if set(reads) == set(operator.reads) else Choices.OUTPUT
