"""Plan: what a user holds. A checked way to run one training step within a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memopt.models.budget import format_bytes
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.program import Program
from memopt.models.steps import ChainStep
from memopt.strategies.base import Status, Strategy

if TYPE_CHECKING:
    from torch import nn

    from memopt.profiler.session import Profiled


@dataclass(frozen=True, slots=True)
class BaselineFigures:
    """The step without memopt: total peak bytes, seconds, and whether they were measured."""

    peak_bytes: int
    step_time_s: float
    measured: bool


@dataclass(frozen=True)
class Plan:
    """A plan that the validator has passed. Bytes are totals, resident included.

    Attributes:
        status: OPTIMAL (in the strategy's class) or FEASIBLE.
        strategy: what made it.
        budget: bytes; None: no limit.
        peak_bytes: replayed peak of the step.
        resident_bytes: how much of it never moves.
        step_time_s: replayed time of the step, seconds.
        lower_bound_s: no plan of the strategy's class within the budget is faster.
        gap: (step_time_s - lower_bound_s) / lower_bound_s.
        host_peak_bytes: host memory for swapped tensors.
        baseline: the step without memopt.
        program: the instructions; None for a plan of a bare Chain.
        chain_steps: the chain schedule, from chain strategies; else None.
        graph: the cost model; None for a plan of a bare Chain.
        chain: the chain a chain strategy planned; else None.
        device: link rates and capacity used.
        stats: what the solver says about itself.
        notes: what a user should know ("the loss is not covered"...).
    """

    status: Status
    strategy: Strategy
    budget: int | None
    peak_bytes: int
    resident_bytes: int
    step_time_s: float
    lower_bound_s: float
    baseline: BaselineFigures
    device: Device
    program: Program | None = None
    chain_steps: tuple[ChainStep, ...] | None = None
    graph: Graph | None = None
    chain: Chain | None = None
    host_peak_bytes: int = 0
    compute_time_s: float = 0.0
    stats: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    profiled: Profiled | None = field(default=None, repr=False, compare=False)

    @property
    def gap(self) -> float:
        """How far the step's time can be from the strategy's best, as a share of the bound."""
        if self.lower_bound_s <= 0:
            return 0.0
        return max(0.0, (self.step_time_s - self.lower_bound_s) / self.lower_bound_s)

    @property
    def overhead(self) -> float:
        """Predicted extra time over running every operator once, as a share of that."""
        if self.compute_time_s <= 0:
            return 0.0
        return self.step_time_s / self.compute_time_s - 1

    @property
    def code(self) -> str:
        """The generated Python that runs the plan's forward and backward."""
        from memopt.executor.module import install

        profiled = self._need_profile("show its code")
        assert self.program is not None
        return install(profiled.captured, profiled.lowering, self.program).source

    def apply(self, model: nn.Module, *, interpreted: bool = False) -> nn.Module:
        """The model as a drop-in module whose training step runs under the plan.

        Args:
            model: the module the plan was made from, or one with the same structure; its
                parameters are shared, not copied.
            interpreted: run instruction by instruction (slower; for debugging).

        Raises:
            PlanFileError: the model's graph is not the planned one.
            ValueError: the plan is of a bare Chain or Graph.
        """
        from memopt.executor.apply import apply_plan

        return apply_plan(self, model, interpreted=interpreted)

    def summary(self) -> str:
        """The plan in a few lines of text."""
        from memopt.report.summary import plan_summary

        return plan_summary(self)

    def __str__(self) -> str:
        return self.summary()

    def _need_profile(self, purpose: str) -> Profiled:
        if self.profiled is None or self.program is None:
            raise ValueError(
                f"this plan was made from a cost model, not from a module: it cannot {purpose}; "
                "call memopt.plan(model, inputs, ...)"
            )
        return self.profiled

    def __repr__(self) -> str:
        budget = "no limit" if self.budget is None else format_bytes(self.budget)
        return (
            f"<memopt.Plan {self.strategy.name} {self.status.value}: "
            f"peak {format_bytes(self.peak_bytes)} of {budget}>"
        )
