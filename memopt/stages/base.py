"""The interface of stages, and their two runs: when a step is planned and, with the recorded
options, when the plan is applied to a model that has to be captured again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from memopt.models.budget import WrittenBudget
from memopt.models.charges import NO_CHARGES, Charges
from memopt.models.device import Device
from memopt.models.options import Pricing, StepOptions
from memopt.models.progress import Progress
from memopt.models.stage_record import options_of, with_record

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memopt.plan_record import PlanRecord
    from memopt.step.build import Lowering
    from memopt.step.captured import Captured
    from memopt.step.inputs import Call
    from memopt.step.optimizer_state import OptimizerState
    from memopt.step.profiled import Profiled
    from memopt.step.ranks import Ranks
    from memopt.step.step_parts import StepParts
    from memopt.strategies.base import Strategy


@dataclass(frozen=True)
class Preparation:
    """A step on its way from a model to what a strategy plans.

    Attributes:
        model, inputs: the user's.
        strategy: the strategy that will plan the step.
        device: for which it is planned.
        step: options that say which step is planned.
        pricing: options for its capture and its costs.
        whole_step: whether it includes the updates.
        place: whether a pass will give its tensors addresses.
        charges: memory that a wrapped model's training loop needs beside the step.
        ranks: the processes that plan together; None: this one plans alone.
        report: the progress callback.
        budget: the user's; after `Agree`, the smallest of all ranks' budgets.
        profiled: the stages' result so far; None: nothing yet, or the model is a cost model.
    """

    model: Any
    inputs: Any
    strategy: Strategy
    device: Device
    step: StepOptions
    pricing: Pricing
    whole_step: bool
    report: Progress
    place: bool = False
    charges: Charges = NO_CHARGES
    ranks: Ranks | None = None
    budget: WrittenBudget = None
    profiled: Profiled | None = None

    def made(self, profiled: Profiled | None, name: str, *options: str) -> Preparation:
        """Take a stage's result, and record the stage's name and options in it."""
        if profiled is not None:
            profiled = replace(profiled, stages=with_record(profiled.stages, name, *options))
        return replace(self, profiled=profiled)


@dataclass(frozen=True)
class Recapture:
    """A planned step that is captured again, from another model or the changed one.

    Attributes:
        plan: the plan, with its stages' options.
        model: the model to run.
        call: the example call; of a whole step, with the targets before the arguments.
        device: where the model is.
        user_call: of a whole step, the example call of the model alone.
        loss_fn, optimizer: of a whole step; None otherwise.
        remedy: for messages, the arguments of `memopt.plan` beside inputs and budget, each with a
            comma.
        example_of_file: whether the example call is from the plan's file.
        changed: for messages, how the model differs from the planned one; None: unknown.
        found: the stages' result so far; None: nothing is captured yet.
    """

    plan: PlanRecord
    model: nn.Module
    call: Call
    device: torch.device
    user_call: Call | None = None
    loss_fn: Any = None
    optimizer: torch.optim.Optimizer | None = None
    remedy: str = ""
    example_of_file: bool = False
    changed: str | None = None
    found: Found | None = None

    @property
    def block_bytes(self) -> int:
        """Return the allocator's block size in the planned graph: that of the planned device,
        wherever the plan is applied."""
        from memopt.step.backend import backend_of

        if self.plan.record is not None:
            return self.plan.record.block_bytes
        return backend_of(self.device).block_bytes

    @property
    def made(self) -> Found:
        """Return the stages' result so far, which includes the capture."""
        assert self.found is not None
        return self.found

    def lowered(self, lowering: Lowering) -> Recapture:
        """Return the step with another lowering."""
        return replace(self, found=replace(self.made, lowering=lowering))

    def plan_again(self) -> str:
        """Say, for messages, how to plan again."""
        return plan_again(self.plan, self.remedy)


@dataclass(frozen=True)
class Found:
    """The result of the stages over a step that is captured again.

    Attributes:
        captured, lowering: the step, as in `Profiled`.
        parts: of a whole step, its capture before the updates were added; None otherwise.
        state: of a whole step, the resident state of its optimizer.
        host_state_bytes, movable_state_bytes: of a whole step; see `ProfiledStep`.
    """

    captured: Captured
    lowering: Lowering
    parts: StepParts | None = None
    state: OptimizerState | None = None
    host_state_bytes: int = 0
    movable_state_bytes: int = 0


@dataclass(eq=False)
class LastCapture:
    """The capture that a plan was last applied to, kept to be reused."""

    captured: Captured | None = None


class PlanStage(ABC):
    """A change to a step between its capture and its plan."""

    name: ClassVar[str]

    def why_not(self, step: Preparation) -> str | None:
        """Say why the stage has nothing to do when this step is planned; None: it runs."""
        return None

    @abstractmethod
    def apply(self, step: Preparation) -> Preparation:
        """Change the step that is planned, and record the change."""

    def again(self, step: Recapture, options: tuple[str, ...] | None) -> Recapture:
        """Make the stage's change to a step that was captured again, as it was made to the planned
        step. By default nothing changes: so it is for stages that change figures alone, which the
        plan's graph has.

        Args:
            step: the step so far.
            options: what the stage ran with when the plan was made; None: it did not run.

        Raises:
            PlanFileError: the step is not the planned one; the message says where.
        """
        return step


def prepared(stages: Iterable[PlanStage], step: Preparation) -> Preparation:
    """Run the stages over a step that is to be planned."""
    for stage in stages:
        if stage.why_not(step) is None:
            step = stage.apply(step)
    return step


def recaptured(stages: Iterable[PlanStage], step: Recapture) -> Found:
    """Run the stages again over a step that was planned before.

    Raises:
        PlanFileError: it is not the planned step; the message says where.
    """
    for stage in stages:
        step = stage.again(step, options_of(step.plan.stages, stage.name))
    return step.made


def plan_again(plan: PlanRecord, more: str = "") -> str:
    """Say, for messages, how to plan again; `more`: further arguments, each with a comma."""
    return (
        f"Plan again: memopt.plan(model, inputs, {more}budget={plan.budget}, "
        f"strategy={plan.strategy.name!r})"
    )
