"""The measured peaks of a model that runs in parts, and estimates of them under other plans and in
steps that call other parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from memopt.errors import NothingToTrainError
from memopt.executor.equal_share import by_kind
from memopt.programs.charged import backward_bytes, forward_bytes, held_bytes, inputs_let_go

if TYPE_CHECKING:
    from torch import nn

    from memopt.models.budget import WrittenBudget
    from memopt.plan_record import PlanRecord
    from memopt.step.inputs import Call


@dataclass(frozen=True)
class PartFigures:
    """What a part's plan needs: bytes at the peaks of its forward and backward, and bytes that it
    keeps in between. Figures of two plans of a part are compared."""

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

    @cached_property
    def adds(self) -> int:
        """Bytes that one more call of the part adds to the rest of a step: what it keeps until its
        backward, output included, or the gradients that the backward makes."""
        graph = self.plan.graph
        made = set(graph.gradients) - graph.resident
        gradient_bytes = sum(graph.tensors[one].size_bytes for one in made)
        return max(self._kept, gradient_bytes)

    @cached_property
    def works(self) -> int:
        """Bytes that its forward or backward needs at its peak beyond what it keeps in between."""
        kept_bytes = self.plan.graph.resident_bytes + self._kept
        return max(0, max(self.forward, self.backward) - kept_bytes)

    @cached_property
    def _kept(self) -> int:
        return held_bytes(self.plan.graph, self.plan.program, outputs=True)


class PartSolver(Protocol):
    """Makes the plans of parts as the user asked for them."""

    def first(
        self, model: nn.Module, call: Call, holding: bool, used: frozenset[int]
    ) -> PlanRecord:
        """Return the store-all plan of a part's kind of call. Its backward begins at the leaves
        `used` of the output (at all if empty).

        Raises:
            CaptureError: the part cannot be captured. NothingToTrainError: nothing is trained.
        """

    def solved(self, first: PlanRecord, budget: WrittenBudget) -> PlanRecord:
        """Return another plan of the same kind of call, within a budget of its own, made by this
        process alone."""

    def small(self, first: PlanRecord, floor: PlanRecord) -> tuple[PlanRecord, ...]:
        """Return plans with a small peak, as `floor`, or that keep little until their backward; as
        many for every part."""


class NothingToSaveError(NothingToTrainError):
    """No plan of a part needs less than the unplanned part, which runs instead."""


def saves_nothing(first: PlanRecord, small: PlanRecord) -> bool:
    """Return whether a part's small plan needs no less memory than the unplanned part.

    A planned call holds all its inputs until its backward, since it may have to run again. An
    unplanned one holds only those that its backward reads (not a softmax's).

    Args:
        first, small: the store-all plan, and the small one.
    """
    kept, least = PartFigures(first), PartFigures(small)
    saved_bytes = max(kept.held - least.held, first.baseline.peak_bytes - small.peak_bytes)
    return saved_bytes <= inputs_let_go(first.graph, first.program)


PartKey = tuple[str, int]
"""The name of a sub-module, and a number among the kinds of its calls."""


@dataclass(eq=False)
class PlannedPart:
    """A part of a model, for one kind of its calls.

    Attributes:
        name: of the sub-module.
        first: its store-all plan.
        small: plans with a small peak, the smallest first, or that keep little until their
            backward.
        waiting: returns how many of its calls await their backward.
        key: what tells it from other parts, the same on all ranks that call it.
        members: the ranks that run it together; none: it communicates with none.
    """

    name: str
    first: PlanRecord
    small: tuple[PlanRecord, ...]
    waiting: Callable[[], int]
    key: PartKey
    members: tuple[int, ...] = ()

    @property
    def floor(self) -> PlanRecord:
        """The plan of the smallest peak."""
        return self.small[0]

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes that a call keeps until its backward under the store-all plan."""
        return PartFigures(self.first).held


PartCalls = Counter[PlannedPart]
"""How often a step calls each part."""


METERED_KEPT = 3
"""How many metered steps are remembered beside the last one."""

MOST_CALLS = 16
"""How many different calls of the parts are remembered for one kind of step."""


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

    @cached_property
    def calls(self) -> PartCalls:
        """How often each part was called."""
        return Counter(
            one.running for _, one in self.sections if one.running is not None and one.is_forward
        )

    def of_calls(self, calls: PartCalls, plans: Mapping[PlannedPart, PartFigures]) -> int:
        """Return the estimated peak of a step that calls other parts, or parts more often. What
        additional calls leave behind is added to every section, and the working memory of their
        forwards and backwards to the sections between the measured parts. A missing call makes room
        for additional ones of the same module."""
        more, needed_bytes = calls - self.calls, self.needed_bytes(plans)
        if not more:
            return needed_bytes
        added: Counter[str] = Counter()
        for part, times in more.items():
            added[part.name] += times * plans[part].adds
        for part, times in (self.calls - calls).items():
            added[part.name] -= times * plans[part].adds if part.name in added else 0
        added_bytes = sum(max(0, size) for size in added.values())
        between = [x + self._more(one, plans) for x, one in self.sections if one.running is None]
        working_bytes = self.base_bytes + max(between) + max(plans[part].works for part in more)
        return added_bytes + max(needed_bytes, working_bytes)

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


@dataclass
class StepKind:
    """One kind of the model's steps.

    Attributes:
        plans: the plans of its parts; a part that is missing runs its plan of the smallest peak.
        measured: the last metered steps, and first an earlier one if it called more.
        metered: how many steps were metered.
        seen: how often steps called each part, without steps that called no part more often than
            another one did.
        untold: such calls of this rank that the others do not know.
        together: name of a part → its calls in the step in which they kept most.
        beside_bytes: what the loop held beside the step when the plans were made.
        changed: whether the plans are to be made anew.
        begun: whether a step has run, so that the next one may be metered; False again if metering
            kept a part from being planned in a backward.
        grown: whether parts were planned in the present step, which is then not metered.
        to_agree: whether the last step was to be metered, and ranks have not yet exchanged its
            figures.
        found: this rank's figures of that step, until then.
        budget_bytes: the budget; None: none, or the smallest.
    """

    plans: dict[PlannedPart, PlanRecord] = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)
    metered: int = 0
    seen: list[PartCalls] = field(default_factory=list)
    untold: list[PartCalls] = field(default_factory=list)
    together: dict[str, PartCalls] = field(default_factory=dict)
    beside_bytes: int = 0
    changed: bool = False
    begun: bool = False
    grown: bool = False
    to_agree: bool = False
    found: Measured | None = None
    budget_bytes: int | None = None

    def count(self, one: Measured) -> None:
        """Count a metered step."""
        self.metered += 1
        if len(self.measured) > METERED_KEPT:
            first, *rest = self.measured
            most = all(_size(first.calls) > _size(other.calls) for other in (*rest, one))
            self.measured = [first, *rest[1:]] if most else rest
        self.measured.append(one)

    def saw(self, calls: PartCalls) -> bool:
        """Remember how often a step called each part; return whether it called one more often than
        each step before."""
        for name in {part.name for part in calls}:
            own = PartCalls({part: times for part, times in calls.items() if part.name == name})
            self.together[name] = max(self.together.get(name, own), own, key=_size)
        if self.knows(calls):
            return False
        self.seen = [*(one for one in self.seen if not one <= calls), calls]
        if len(self.seen) > MOST_CALLS:
            self.seen.remove(min(self.seen, key=_size))
        return True

    def knows(self, calls: PartCalls) -> bool:
        """Return whether a step called each part as often, as far as ranks have told."""
        known = [*self.seen, *(one.calls for one in self.measured)]
        return not calls or any(calls <= one for one in known)

    def tell(self) -> list[dict[PartKey, int]]:
        """Return the calls of this rank that the others do not know, for these."""
        untold, self.untold = self.untold, []
        return [{part.key: times for part, times in one.items()} for one in untold]

    def hear(self, told: Iterable[dict[PartKey, int]], parts: Iterable[PlannedPart]) -> None:
        """Remember what a rank tells of its calls, as far as this one has such parts."""
        known = {part.key: part for part in parts}
        for calls in told:
            own = {known[key]: times for key, times in calls.items() if key in known}
            self.saw(PartCalls(own))

    def needed_bytes(self, plans: Mapping[PlannedPart, PartFigures], together: bool = False) -> int:
        """Return the peak of such a step under these plans: the largest that was measured, or
        estimated for steps that called more than the metered ones.

        Args:
            plans: of all parts.
            together: whether to assume a step that calls each part as often as any step has.
        """
        found = [one.needed_bytes(plans) for one in self.measured]
        every = [sum(self.together.values(), PartCalls())] if together else []
        seen = [
            min(one.of_calls(calls, plans) for one in self.measured)
            for calls in (*self.seen, *every)
        ]
        return self.beside_bytes + max(*found, *seen, 0)


def _size(calls: PartCalls) -> int:
    """Return the bytes that calls keep until their backward under store-all plans."""
    return sum(times * part.stored_bytes for part, times in calls.items())


def least_unmeasured(
    most: Mapping[PlannedPart, int], of: Callable[[PlanRecord], PartFigures]
) -> dict[PlannedPart, PlanRecord]:
    """Return the plans of parts that need the least memory in a step that was not measured.

    Args:
        most: how many calls of each part await their backward at once.
        of: returns a plan's figures.
    """

    def needed(plans: Mapping[PlannedPart, PlanRecord]) -> int:
        figures = {part: of(plan) for part, plan in plans.items()}
        held = sum(times * figures[part].held for part, times in most.items())
        running = (
            max(one.forward, one.backward) - one.held - one.plan.resident_bytes
            for one in figures.values()
        )
        return held + max(running)

    return min(by_kind(most, (part.small for part in most)), key=needed)
