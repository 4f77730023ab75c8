"""What a stage is, and how all of them run: once when a step is planned, and again, as recorded,
when the plan is applied to a model that has to be captured anew."""

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
        strategy: who will plan it.
        device: for which it is planned.
        step: the step to plan.
        pricing: how it is captured and priced.
        whole_step: whether it includes the updates.
        place: whether a pass will give its tensors addresses.
        charges: what a wrapped model's loop needs beside it.
        ranks: the processes that plan together; None: this one plans alone.
        report: how far it is.
        budget: the user's; of ranks, from `Agree` on, the smallest of theirs.
        profiled: what the stages have made so far; None: nothing, or the model is a cost model.
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
        """The step after a stage of this name, which is recorded in what it made."""
        if profiled is not None:
            profiled = replace(profiled, stages=with_record(profiled.stages, name, *options))
        return replace(self, profiled=profiled)


@dataclass(frozen=True)
class Recapture:
    """A planned step on its way from another model, or the changed one, to what runs.

    Attributes:
        plan: with what its stages ran.
        model: the model to run.
        call: the example call, of a whole step with the targets before the arguments.
        device: where the model is.
        user_call: of a whole step, the example call of the model alone.
        loss_fn, optimizer: of a whole step.
        remedy: for messages, what to pass to `memopt.plan` beside the inputs and the budget, each
            argument with a comma.
        example_of_file: whether the example call is that of the plan's file.
        changed: for messages, in what the model differs from the planned one; None: unknown.
        found: what the stages have made so far.
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
        """The allocator's granularity in the planned graph. An estimate for CUDA counts in its
        blocks wherever the plan is applied."""
        from memopt.step.backend import backend_of

        if self.plan.record is not None:
            return self.plan.record.block_bytes
        return backend_of(self.device).block_bytes

    @property
    def made(self) -> Found:
        """What the stages have made so far, which includes the capture."""
        assert self.found is not None
        return self.found

    def lowered(self, lowering: Lowering) -> Recapture:
        """The step with another lowering."""
        return replace(self, found=replace(self.made, lowering=lowering))

    def plan_again(self) -> str:
        """How to plan again, for messages."""
        return plan_again(self.plan, self.remedy)


@dataclass(frozen=True)
class Found:
    """A step that was captured anew.

    Attributes:
        captured, lowering: the step, as `Profiled` has them.
        parts: of a whole step.
        state: of a whole step, the optimizer's state that is resident.
        host_state_bytes: of a whole step, see `ProfiledStep`.
    """

    captured: Captured
    lowering: Lowering
    parts: StepParts | None = None
    state: OptimizerState | None = None
    host_state_bytes: int = 0


@dataclass(eq=False)
class LastCapture:
    """What a plan was last applied to, kept for the next time that it is."""

    captured: Captured | None = None


class PlanStage(ABC):
    """One change to a step between its capture and its plan."""

    name: ClassVar[str]

    def why_not(self, step: Preparation) -> str | None:
        """Say why the stage has nothing to do when this step is planned; None: it runs."""
        return None

    @abstractmethod
    def apply(self, step: Preparation) -> Preparation:
        """Change the step that is planned, and record it."""

    def again(self, step: Recapture, options: tuple[str, ...] | None) -> Recapture:
        """Change a step that was captured anew as the plan's was changed; not at all where that
        changed its figures alone, which the plan's graph has.

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
        PlanFileError: it is not the planned one; the message says where.
    """
    for stage in stages:
        step = stage.again(step, options_of(step.plan.stages, stage.name))
    return step.made


def plan_again(plan: PlanRecord, more: str = "") -> str:
    """How to plan again, for messages; `more`: arguments beside the inputs, each with a comma."""
    return (
        f"Plan again: memopt.plan(model, inputs, {more}budget={plan.budget}, "
        f"strategy={plan.strategy.name!r})"
    )
