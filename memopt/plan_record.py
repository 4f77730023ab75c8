"""The fields of a plan: figures, program, cost model and record, without its methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memopt.models.bounds import relative_gap
from memopt.models.chain import Chain
from memopt.models.codec import Bytes, Seconds
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.record import ANY_LOSS, ModelRecord, OutputGradients
from memopt.models.stage_record import StageRecord, options_of
from memopt.models.status import Status
from memopt.models.steps import ChainStep
from memopt.programs.allocator_requests import AllocatorFigures, reserved_by
from memopt.programs.allocator_settings import AllocatorSettings
from memopt.programs.instructions import Program
from memopt.programs.placed import ArenaUse, arena_use
from memopt.strategies.base import Strategy

if TYPE_CHECKING:
    from memopt.step.profiled import Profiled

STOPPED = "The search was stopped before its end: planning again may find a better plan."
"""The note of a plan whose search the user stopped. It is not kept for later."""


@dataclass(frozen=True, slots=True)
class BaselineFigures:
    """The step without memopt: total peak bytes, seconds, and whether they were measured."""

    peak_bytes: Bytes
    step_time_s: Seconds
    measured: bool


@dataclass(frozen=True)
class PlanRecord:
    """A plan that the validator has passed. Bytes are totals, resident included.

    Attributes:
        status: OPTIMAL (in the strategy's class) or FEASIBLE.
        strategy: the strategy that made it.
        budget: bytes; None: no limit.
        host_budget: the most that the program may have on the host at once, bytes; None: no limit.
        peak_bytes: replayed peak of the step.
        resident_bytes: the part of the peak that is on the device during the whole step.
        step_time_s: replayed time of the step, seconds.
        lower_bound_s: no plan of the strategy's class within the budget is faster; seconds.
        gap: (step_time_s - lower_bound_s) / lower_bound_s.
        host_peak_bytes: host memory for swapped tensors.
        baseline: the step without memopt.
        graph: the cost model; of a bare Chain, the equivalent graph.
        program: the instructions.
        chain: the chain that was planned: a bare one or, by a chain strategy, the graph's. None:
            the graph itself was planned.
        chain_steps: the schedule of `chain`.
        is_of_chain: whether the plan is of a bare Chain.
        device: link rates and capacity used.
        stats: statistics of the solver and the passes: for people, never read back by memopt.
        stages: the stages and passes that ran, with their options, in order.
        allocated_budget_bytes: of a plan within a budget on reserved bytes, the budget on allocated
            bytes that led to it; None: `budget` is on allocated bytes.
        notes: for the user ("the loss is not covered"...).
        profiled: the captured model; None for a plan of a cost model, or from a file.
        record: the description of the model and its example call that plan files store.
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
    graph: Graph
    program: Program
    chain: Chain | None = None
    chain_steps: tuple[ChainStep, ...] | None = None
    is_of_chain: bool = False
    host_budget: int | None = None
    host_peak_bytes: int = 0
    compute_time_s: float = 0.0
    stats: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    stages: tuple[StageRecord, ...] = ()
    allocated_budget_bytes: int | None = None
    profiled: Profiled | None = field(default=None, repr=False, compare=False)
    record: ModelRecord | None = field(default=None, repr=False, compare=False)

    @property
    def gap(self) -> float:
        """Return how far the step's time is above the bound at most, as a share of the bound."""
        return max(0.0, relative_gap(self.step_time_s, self.lower_bound_s))

    @property
    def overhead(self) -> float:
        """Return the predicted extra time over running every operator once, as a share of that."""
        if self.compute_time_s <= 0:
            return 0.0
        return self.step_time_s / self.compute_time_s - 1

    @property
    def output_gradients(self) -> OutputGradients:
        """Return how the planned loss uses the model's output: the leaves without a gradient, since
        it does not use them, and the layouts of the other leaves' gradients."""
        return self.record.output_gradients if self.record is not None else ANY_LOSS

    @property
    def loss_bytes(self) -> int:
        """Return the planned loss's own bytes, charged as resident; 0 if it is one number."""
        return self.record.loss_bytes if self.record is not None else 0

    @property
    def reserved(self) -> AllocatorFigures | None:
        """Simulate how much CUDA's caching allocator allocates and reserves for the step, with the
        settings of this process (PYTORCH_ALLOC_CONF; `memopt.programs.caching_allocator`); None for
        other devices. On CUDA this is what `max_memory_allocated` and `max_memory_reserved` are to
        show: blocks that are not split count whole, by which the first may be above the plan's
        peak; not with expandable segments."""
        record_bytes = 1 if self.record is None else self.record.block_bytes
        if max(record_bytes, self.device.block_bytes) == 1:
            return None
        return reserved_by(self.graph, self.program, AllocatorSettings.of_environment())

    @property
    def reserved_bytes_limited(self) -> bool:
        """Whether the budget limits what the allocator reserves, not what is allocated."""
        return self.allocated_budget_bytes is not None

    def ran(self, name: str) -> bool:
        """Whether a stage or a pass of this name made the plan."""
        return options_of(self.stages, name) is not None

    @property
    def arena(self) -> ArenaUse | None:
        """Return the bytes inside and outside of the plan's arena; None without addresses."""
        return arena_use(self.graph, self.program)
