"""One budget over the planned parts of a model that runs in parts.

What lies between the parts is the user's code, so a step's memory is measured: first under the
parts' plans of the smallest peak, section by section (a part's forward or backward, or what lies
between). Under other plans a section needs what was measured, and what the plans' programs say that
the waiting parts keep more, and that the running one needs more. Each part's budget lies the same
share of the way from its smallest peak to its store-all's; that share is the largest with which
every section is within the budget. What is left of it lets single parts keep everything.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import nn

from memopt.executor.surroundings import Surroundings, bytes_of, is_metered
from memopt.models.budget import MINIMUM, WrittenBudget, format_bytes, parse_budget
from memopt.models.device import in_blocks
from memopt.pricing.memory import LossMeter
from memopt.pricing.step_meter import StepMeter
from memopt.programs.charged import backward_bytes, forward_bytes, held_bytes
from memopt.step.backend import backend_of
from memopt.step.inputs import Call, device_of

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord

T = TypeVar("T")
P = TypeVar("P", bound="PlanRecord")
_SHARES = 16


class PartSolver(Protocol):
    """Makes the plans of parts as the user asked for them."""

    def first(self, model: nn.Module, call: Call, holding: bool) -> PlanRecord:
        """Return the plan that keeps everything, of a part's kind of call.

        Raises:
            CaptureError: the part cannot be captured. NothingToTrainError: nothing is trained.
        """

    def solved(self, first: PlanRecord, budget: WrittenBudget) -> PlanRecord:
        """Return another plan of the same kind of call, within a budget of its own."""


def equal_share(
    together: Iterable[T],
    budget_bytes: int | None,
    floors: Mapping[T, P],
    stored: Mapping[T, P],
    solved: Callable[[T, int], P],
    needed: Callable[[Mapping[T, P]], int],
) -> Mapping[T, P] | None:
    """Plan each of several graphs that run in one step the same share of the way from its smallest
    peak to its store-all's: the largest, to a sixteenth, with which the step is within the budget.

    Args:
        together: the graphs.
        budget_bytes: of the step; None: the smallest that can be.
        floors, stored: each graph's plan of the smallest peak, and its store-all plan.
        solved: plans one within a budget of its own.
        needed: returns the bytes of the step under these plans.

    Returns:
        The plans; None: even the smallest exceed the budget.
    """
    if budget_bytes is None:
        return floors
    if budget_bytes >= needed(stored):
        return stored
    if budget_bytes < needed(floors):
        return None
    best, low, high = floors, 0, _SHARES
    while high - low > 1:
        middle = (low + high) // 2
        made = {one: solved(one, _between(floors[one], stored[one], middle)) for one in together}
        fits = needed(made) <= budget_bytes
        best = made if fits else best
        low, high = (middle, high) if fits else (low, middle)
    return best


def _filled(
    plans: Mapping[T, PlanRecord],
    stored: Mapping[T, PlanRecord],
    fits: Callable[[Mapping[T, PlanRecord]], bool],
) -> Mapping[T, PlanRecord]:
    """Let those graphs keep everything for which there is room, the slowest under its plan
    first."""
    slower = sorted(plans, key=lambda one: stored[one].step_time_s - plans[one].step_time_s)
    for one in slower:
        other = {**plans, one: stored[one]}
        if plans[one] is not stored[one] and fits(other):
            plans = other
    return plans


def _between(floor: PlanRecord, stored: PlanRecord, share: int) -> int:
    return floor.peak_bytes + (stored.peak_bytes - floor.peak_bytes) * share // _SHARES


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
class _Section:
    """A section of a step: the parts that wait for their backward meanwhile, how often, and the one
    that runs (None: the user's code)."""

    waiting: Mapping[PlannedPart, int]
    running: PlannedPart | None = None
    is_forward: bool = False


@dataclass(frozen=True)
class _Measured:
    """A measured step: its sections and their levels, above `base_bytes`, under `plans`."""

    base_bytes: int
    sections: Sequence[tuple[int, _Section]]
    plans: Mapping[PlannedPart, PartFigures]

    def needed_bytes(self, plans: Mapping[PlannedPart, PartFigures]) -> int:
        """Return the peak of such a step under other plans."""
        return self.base_bytes + max(level + self._more(x, plans) for level, x in self.sections)

    def _more(self, section: _Section, plans: Mapping[PlannedPart, PartFigures]) -> int:
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
class _Kind:
    """One kind of the model's steps.

    Attributes:
        plans: of its parts; a part that is not here has its floor.
        measured: the last steps that were metered.
        metered: how many were.
        beside_bytes: what the loop holds that the plans were made for.
        changed: whether something was met that the plans do not know of.
        begun: whether one has run; the first makes plans, and is not metered.
        grown: whether the present one makes plans.
        budget_bytes: the budget; None: none, or the smallest.
    """

    plans: dict[PlannedPart, PlanRecord] = field(default_factory=dict)
    measured: list[_Measured] = field(default_factory=list)
    metered: int = 0
    beside_bytes: int = 0
    changed: bool = False
    begun: bool = False
    grown: bool = False
    budget_bytes: int | None = None


class SharedBudget:
    """Divides a budget among the parts of a model.

    Args:
        model: the model.
        budget: as the user wrote it.
        solver: makes plans.
        around: the memory met around its steps.
    """

    def __init__(
        self, model: nn.Module, budget: WrittenBudget, solver: PartSolver, around: Surroundings
    ) -> None:
        self._model, self._written, self.solver, self._around = model, budget, solver, around
        self._kinds: dict[Any, _Kind] = {}
        self._now: _Kind | None = None
        self._parts: list[PlannedPart] = []
        self._figures: dict[int, PartFigures] = {}
        self._meter: StepMeter | None = None
        self._sections: list[_Section] = []
        self._told = False

    def part(self, name: str, first: PlanRecord, waiting: Callable[[], int]) -> PlannedPart:
        """Add a part, whose first plan is the one of the smallest peak."""
        made = PlannedPart(name, first, self.solver.solved(first, MINIMUM), waiting)
        self._parts.append(made)
        if self._now is not None:
            self._now.grown = True
        return made

    def plan_of(self, part: PlannedPart) -> PlanRecord:
        """Return the plan with which a part is to run now."""
        return part.floor if self._now is None else self._now.plans.get(part, part.floor)

    def peak_bytes(self) -> int | None:
        """Return the peak of the last kind of step as far as it was measured; None: not yet."""
        kind = self._now
        if kind is None or not kind.measured:
            return None
        return self._needed(kind, kind.plans)

    def calling(self, key: Any, call: Call) -> None:
        """Begin a call of the model; if calls before it still await their backward it is in the
        same step."""
        if any(self._waiting()):
            return
        self._stop()
        kind = self._now = self._kinds.setdefault(key, _Kind())
        charges = self._around.charges(key)
        beside_bytes = charges.resident_bytes + charges.forward_bytes
        if kind.measured and (kind.changed or beside_bytes > kind.beside_bytes):
            kind.beside_bytes, kind.changed = beside_bytes, False
            self._divide(kind)
        begun, kind.begun, kind.grown = kind.begun, True, False
        if begun and is_metered(kind.metered + 1):
            self._begin(kind, call)

    @contextmanager
    def forward(self, part: PlannedPart) -> Iterator[None]:
        """Run the forward of a part inside."""
        self._mark(_Section(self._waiting(), part, True))
        yield
        self._mark(_Section(self._waiting()))

    def arrived(self, part: PlannedPart, _tangents: list[Any]) -> None:
        """Note that the backward of a part's call begins."""
        waiting = self._waiting()
        if part in waiting:
            waiting[part] -= 1
        self._mark(_Section(waiting, part), backward=True)

    def _mark(self, section: _Section, backward: bool = False) -> None:
        if self._meter is not None and self._meter.mark(backward):
            self._sections.append(section)

    def _waiting(self) -> dict[PlannedPart, int]:
        found = {part: part.waiting() for part in self._parts}
        return {part: count for part, count in found.items() if count}

    def _begin(self, kind: _Kind, call: Call) -> None:
        device = device_of(self._model, call)
        if not LossMeter.possible(device):
            return
        block_bytes = backend_of(device).block_bytes
        gradients = (parameter.grad for parameter in self._model.parameters())
        held = [*self._model.parameters(), *self._model.buffers(), *call.tensors(), *gradients]
        base_bytes = in_blocks(bytes_of(held), block_bytes)
        plans = {part: self._of(self.plan_of(part)) for part in self._parts}
        sections = self._sections = [_Section({})]

        def found(levels: list[int]) -> None:
            if kind.grown or len(levels) != len(sections):
                return  # planning has measured meanwhile
            kind.metered += 1
            made = _Measured(base_bytes, tuple(zip(levels, sections, strict=True)), plans)
            kind.measured = [*kind.measured[-3:], made]
            limit = kind.budget_bytes
            over = limit is not None and self._needed(kind, kind.plans) > limit
            kind.changed = kind.changed or over or not kind.plans

        self._meter = StepMeter(device, found)

    def _stop(self) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.close()

    def remove(self) -> None:
        """Stop metering."""
        self._stop()

    def _of(self, plan: PlanRecord) -> PartFigures:
        return self._figures.setdefault(id(plan), PartFigures(plan))

    def _needed(self, kind: _Kind, plans: Mapping[PlannedPart, PlanRecord]) -> int:
        """Return the peak of a kind of step, total bytes, under these plans."""
        figures = {part: self._of(plans.get(part, part.floor)) for part in self._parts}
        return kind.beside_bytes + max(one.needed_bytes(figures) for one in kind.measured)

    def _divide(self, kind: _Kind) -> None:
        """Plan the parts of a kind of step within the budget."""
        together = list(dict.fromkeys(part for one in kind.measured for part in one.plans))
        stored = {part: part.first for part in together}
        floors = {part: part.floor for part in together}
        if self._written is None:
            kind.plans = stored
            return
        most_bytes = self._needed(kind, stored)
        least = self._written == MINIMUM
        kind.budget_bytes = None if least else parse_budget(self._written, most_bytes)
        budget_bytes = kind.budget_bytes
        made = equal_share(
            together,
            budget_bytes,
            floors,
            stored,
            lambda part, budget: self.solver.solved(part.first, budget),
            lambda plans: self._needed(kind, plans),
        )
        if made is not None and budget_bytes is not None:
            made = _filled(made, stored, lambda plans: self._needed(kind, plans) <= budget_bytes)
        kind.plans = dict(floors if made is None else made)
        if made is None and not self._told:
            self._told = True
            least_bytes = self._needed(kind, floors)
            warnings.warn(
                f"steps of the model in parts exceed their budget of {kind.budget_bytes} bytes: "
                f"under the parts' smallest plans one needs {format_bytes(least_bytes)}, and what "
                f"lies between the parts is not planned: give at least budget={least_bytes}. The "
                "smallest plans run instead",
                stacklevel=2,
            )
