"""What a model that runs in parts was measured to need, and what it needs under other plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from memopt.errors import NothingToTrainError
from memopt.programs.charged import backward_bytes, forward_bytes, held_bytes, inputs_let_go

if TYPE_CHECKING:
    from torch import nn

    from memopt.models.budget import WrittenBudget
    from memopt.plan_record import PlanRecord
    from memopt.step.inputs import Call


@dataclass(frozen=True)
class PartFigures:
    """What a part's plan needs: bytes at the peaks of its forward and backward, and bytes that it
    keeps in between. Compared with those of another plan of the part."""

    plan: PlanRecord

    @cached_property
    def held(self) -> int:
        """Bytes kept from the forward for the backward."""
        return held_bytes(self.plan.graph, self.plan.program)

    @cached_property
    def forward(self) -> int:
        """Peak of the forward, in bytes."""
        return forward_bytes(self.plan.graph, self.plan.program)

    @cached_property
    def backward(self) -> int:
        """Peak of the backward, in bytes."""
        return backward_bytes(self.plan.graph, self.plan.program)


class PartSolver(Protocol):
    """Makes the plans of parts as the user asked for them."""

    def first(
        self, model: nn.Module, call: Call, holding: bool, used: frozenset[int]
    ) -> PlanRecord:
        """Return the plan that keeps everything, of a part's kind of call, for a backward from the
        leaves `used` of its output; none: from all.

        Raises:
            CaptureError: the part cannot be captured. NothingToTrainError: nothing is trained.
        """

    def solved(self, first: PlanRecord, budget: WrittenBudget) -> PlanRecord:
        """Return another plan of the same kind of call, within a budget of its own, made by this
        process alone."""

    def small(self, first: PlanRecord, floor: PlanRecord) -> tuple[PlanRecord, ...]:
        """Return plans that need little, in their peak, as `floor` does, or until their backward:
        of all parts equally many."""


class NothingToSaveError(NothingToTrainError):
    """No plan of a part needs less than the part itself, which is to run as it is."""


def most_waiting(sections: Iterable[Mapping[PlannedPart, int]]) -> dict[PlannedPart, int]:
    """Return how many calls of each part wait at once, at most."""
    found: dict[PlannedPart, int] = {}
    for waiting in sections:
        for part, times in waiting.items():
            found[part] = max(times, found.get(part, 0))
    return found


def saves_nothing(first: PlanRecord, small: PlanRecord) -> bool:
    """Return whether a part's plan that needs little needs no less than the unplanned part.

    A planned call holds its inputs until its backward, since it may have to run again; unplanned,
    those go that its backward does not read (a softmax's), which user code need not hold.

    Args:
        first, small: its store-all plan, and the other one.
    """
    kept, least = PartFigures(first), PartFigures(small)
    saved_bytes = max(kept.held - least.held, first.baseline.peak_bytes - small.peak_bytes)
    return saved_bytes <= inputs_let_go(first.graph, first.program)


@dataclass(eq=False)
class PlannedPart:
    """A part of a model, for one kind of its calls.

    Attributes:
        name: of the sub-module.
        first: its store-all plan.
        small: plans that need little, the one of the smallest peak first.
        waiting: returns how many of its calls await their backward.
    """

    name: str
    first: PlanRecord
    small: tuple[PlanRecord, ...]
    waiting: Callable[[], int]

    @property
    def floor(self) -> PlanRecord:
        """The plan of the smallest peak."""
        return self.small[0]


@dataclass(frozen=True)
class StepSection:
    """A section of a step: the parts that wait for their backward meanwhile, how often, and the one
    that runs (None: the user's code)."""

    waiting: Mapping[PlannedPart, int]
    running: PlannedPart | None = None
    is_forward: bool = False


@dataclass(frozen=True)
class Measured:
    """A measured step: its sections and their levels, above `base_bytes`, under `plans`."""

    base_bytes: int
    sections: Sequence[tuple[int, StepSection]]
    plans: Mapping[PlannedPart, PartFigures]

    @cached_property
    def calls(self) -> Mapping[PlannedPart, int]:
        """How many calls of a part awaited their backward at once."""
        return most_waiting(section.waiting for _, section in self.sections)

    def needed_bytes(
        self, plans: Mapping[PlannedPart, PartFigures], most: Mapping[PlannedPart, int]
    ) -> int:
        """Return the peak of such a step under other plans.

        Args:
            plans: of all parts.
            most: calls that other steps make of parts, and this one may have made fewer of: what
                they keep is charged, too.
        """
        own_bytes = max(level + self._more(x, plans) for level, x in self.sections)
        return self.base_bytes + own_bytes + self._missing(plans, most)

    def _missing(
        self, plans: Mapping[PlannedPart, PartFigures], most: Mapping[PlannedPart, int]
    ) -> int:
        """Return what the calls keep that only other steps made. Another kind of call of the same
        part stands for one that this step made."""
        missing = 0
        for name in {part.name for part in most}:
            alike = [part for part in most if part.name == name]
            times = max(most[part] for part in alike) - sum(self.calls.get(x, 0) for x in alike)
            if times > 0:
                missing += times * max(plans[part].held for part in alike)
        return missing

    def _more(self, section: StepSection, plans: Mapping[PlannedPart, PartFigures]) -> int:
        more = 0
        for part, times in section.waiting.items():
            if part in plans and part in self.plans:
                more += times * (plans[part].held - self.plans[part].held)
        one = section.running
        if one is None or one not in plans or one not in self.plans:
            return more
        before, now = self.plans[one], plans[one]
        if section.is_forward:
            return more + now.forward - before.forward
        # The section goes on after the part's backward, where a smaller peak of it frees nothing.
        return more + max(0, now.backward - before.backward)


def least_unmeasured(
    most: Mapping[PlannedPart, int], of: Callable[[PlanRecord], PartFigures]
) -> dict[PlannedPart, PlanRecord]:
    """Return the plans of parts that need least in a step which was not measured.

    Args:
        most: how many calls of each part await their backward at once.
        of: a plan's figures.
    """

    def needed(plans: Mapping[PlannedPart, PlanRecord]) -> int:
        figures = {part: of(plan) for part, plan in plans.items()}
        held = sum(times * figures[part].held for part, times in most.items())
        running = (
            max(one.forward, one.backward) - one.held - one.plan.resident_bytes
            for one in figures.values()
        )
        return held + max(running)

    small = zip(*(part.small for part in most), strict=True)
    return min((dict(zip(most, plans, strict=True)) for plans in small), key=needed)
