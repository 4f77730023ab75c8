"""What a model that runs in parts was measured to need, and what it needs under other plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from memopt.errors import NothingToTrainError
from memopt.programs.charged import backward_bytes, forward_bytes, held_bytes, inputs_let_go

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord


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


class NothingToSaveError(NothingToTrainError):
    """No plan of a part needs less than the part itself, which is to run as it is."""


def saves_nothing(first: PlanRecord, floor: PlanRecord) -> bool:
    """Return whether a part's plan of the smallest peak needs no less than the unplanned part.

    A planned call holds its inputs until its backward, since it may have to run again; unplanned,
    those go that its backward does not read (a softmax's), which user code need not hold.

    Args:
        first, floor: its store-all plan, and its plan of the smallest peak.
    """
    kept, least = PartFigures(first), PartFigures(floor)
    saved_bytes = max(kept.held - least.held, first.baseline.peak_bytes - floor.peak_bytes)
    return saved_bytes <= inputs_let_go(first.graph, first.program)


@dataclass(eq=False)
class PlannedPart:
    """A part of a model, for one kind of its calls.

    Attributes:
        name: of the sub-module.
        first, floor: its store-all plan, and its plan of the smallest peak.
        waiting: returns how many of its calls await their backward.
    """

    name: str
    first: PlanRecord
    floor: PlanRecord
    waiting: Callable[[], int]


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

    def needed_bytes(self, plans: Mapping[PlannedPart, PartFigures]) -> int:
        """Return the peak of such a step under other plans."""
        return self.base_bytes + max(level + self._more(x, plans) for level, x in self.sections)

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
