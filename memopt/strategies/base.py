"""The base class of strategies: one frozen value whose fields are its parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.progress import Progress as Progress
from memopt.models.status import Status
from memopt.models.steps import ChainStep
from memopt.programs.instructions import Program
from memopt.programs.replay import Timeline
from memopt.programs.solution import Solution
from memopt.reductions.chain_replay import ChainTimeline

CostModel: TypeAlias = Chain | Graph
Kind = TypeVar("Kind", Chain, Graph)


def solution_of(
    plan: Program | tuple[ChainStep, ...],
    timeline: Timeline | ChainTimeline,
    bound_s: float,
    proved: float,
    stats: Mapping[str, object],
) -> Solution:
    """Make the solution of a plan, optimal where its gap is at most `proved`."""
    bound_s = min(timeline.time_s, bound_s)
    # Not by the gap, which is 0 for a bound of 0.
    optimal = timeline.time_s <= bound_s * (1 + proved)
    steps, program = (plan, None) if isinstance(plan, tuple) else (None, plan)
    found = Solution(
        Status.FEASIBLE, steps, program, timeline.peak_bytes, timeline.time_s, stats=stats
    )
    return found.bounded(bound_s, optimal)


@dataclass(frozen=True)
class Features:
    """The features of a strategy's plans: recomputation, transfers to the host and back, another
    order, addresses, other implementations of operators, updates that the host runs."""

    recompute: bool = False
    offload: bool = False
    order: bool = False
    place: bool = False
    implementations: bool = False
    host_updates: bool = False


class Strategy(ABC):
    """A way to plan a step. Subclasses are frozen dataclasses; their fields are parameters.

    Class attributes:
        name: the name `memopt.plan(strategy=...)` resolves.
        needs: "chain", "graph" or "any": the cost model `solve` takes.
        features: what its plans use.
        references: the papers it implements.
        decides_in_place: whether its programs say what is computed in place; else planning does
            that wherever a program allows it.
    """

    name: ClassVar[str]
    needs: ClassVar[str]
    features: ClassVar[Features] = Features()
    references: ClassVar[tuple[str, ...]] = ()
    decides_in_place: ClassVar[bool] = False

    def refines_smallest(self, cost_model: CostModel) -> bool:
        """Tell whether `budget="min"` also searches within less than the smallest budget that a
        solution names."""
        return True

    def only_exact_implementations(self) -> bool | None:
        """Tell whether `memopt.plan`, looking for alternatives of operators, leaves out
        implementations that change rounding; None: it does not look for any."""
        return None

    def wants_implementations(self, step_s: float) -> bool:
        """Tell whether a step of so many seconds is worth looking for alternatives."""
        return True

    def in_search(self, spent_s: float) -> Strategy:
        """Return the strategy for one more solve of a search of several, which has taken so many
        seconds: what it takes without a time limit is for all of them together."""
        return self

    def at_first(self) -> Strategy | None:
        """Return the same strategy, but with a plan at once, which this one improves; None: there
        is none."""
        return None

    def improved_by(self) -> Strategy | None:
        """Return the strategy that this one is the `at_first` of; None: it is of none."""
        return None

    def worth_improving(self, step_s: float, bound_s: float, limit_s: float | None) -> bool:
        """Tell whether a plan of `at_first` is worth a search.

        Args:
            step_s: the time of its step, seconds.
            bound_s: a lower bound on any step's time.
            limit_s: the time that the user gives the search, if that is given.
        """
        return False

    @property
    def plans_forward(self) -> bool:
        """Tell whether its plans may need less memory, without a backward, than running every
        operator once. Chain strategies only choose what a backward reads, so theirs cannot."""
        return self.needs != "chain"

    @property
    def plans_operators(self) -> bool:
        """Tell whether, of a chain, it plans the operators (`memopt.reductions.chain_operators`),
        not schedules of the chain's own moves."""
        return self.needs == "graph"

    def why_not(self, cost_model: CostModel) -> str | None:
        """Return why this strategy cannot plan this cost model; None if it can."""
        if self.needs == "any":
            return None
        wanted = Chain if self.needs == "chain" else Graph
        if isinstance(cost_model, wanted):
            return None
        return f"{self.name} plans a {self.needs}, not a {type(cost_model).__name__}"

    def taken(self, cost_model: CostModel, kind: type[Kind]) -> Kind:
        """Return the cost model as the kind that the strategy plans.

        Raises:
            ValueError: the strategy cannot plan it; see `why_not`.
        """
        reason = self.why_not(cost_model)
        if reason is not None or not isinstance(cost_model, kind):
            raise ValueError(reason or f"{self.name} plans a {kind.__name__}")
        return cost_model

    @abstractmethod
    def solve(
        self,
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        """Plan the step within a budget.

        Laws, for every strategy: the same cost model, budget and seed give the same plan, byte
        for byte. A plan that is returned passes the validator and its replayed peak is at most
        the budget. `lower_bound_s` ≤ `time_s`. INFEASIBLE is proved of the strategy's class; else
        a solution without a plan is UNKNOWN. Either names the smallest budget known to be feasible
        with a plan for it (`smallest`), whatever the time limit. A solve stopped by its time
        limit or by KeyboardInterrupt returns its best plan so far with its bound.

        Args:
            cost_model: the Chain or Graph, as `needs` says.
            budget_bytes: total device memory for the step, resident included; None: no limit.
            device: link rates and capacity, for strategies that move data.
            time_limit_s: seconds to spend at most, where the strategy can stop early.
            progress: called now and then.
        """

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
        """Plan as `solve` does; `known` are programs of the graph within the budget, the fastest
        first, from which a strategy that improves programs starts."""
        return self.solve(
            cost_model, budget_bytes, device=device, time_limit_s=time_limit_s, progress=progress
        )


class Improver(Strategy):
    """A strategy that starts from programs that are known, where there are any."""

    def solve(self, cost_model: CostModel, budget_bytes: int | None, **how: Any) -> Solution:
        return self.solve_from((), cost_model, budget_bytes, **how)

    @abstractmethod
    def solve_from(
        self,
        known: Sequence[Program],
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution: ...
