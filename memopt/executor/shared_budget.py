"""One budget over the planned parts of a model that runs in parts.

Between the parts the user's code runs, so a step's memory is measured: first under the parts' plans
of the smallest peak, section by section (a part's forward or backward, or what lies between). Under
other plans a section's peak is the measured one, plus what their programs keep more in the waiting
parts and need more in the running one. Each part's budget lies the same share of the way from its
smallest peak to its store-all peak; that share is the largest with which every section is within
the budget. Instead, each part runs its forward again if that is faster. With what is left of the
budget single parts keep everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from memopt.errors import ProfilerBusyError
from memopt.executor.equal_share import by_kind, chosen
from memopt.executor.held_memory import METERED, is_metered, memory_of
from memopt.executor.measured_parts import (
    Measured,
    NothingToSaveError,
    PartCalls,
    PartFigures,
    PartKey,
    PartSolver,
    PlannedPart,
    StepKind,
    StepSection,
    least_unmeasured,
    saves_nothing,
)
from memopt.executor.parts_of_ranks import CALLED, by_first, saw
from memopt.executor.surroundings import Surroundings
from memopt.models.budget import MINIMUM, WrittenBudget, format_bytes, parse_budget
from memopt.models.device import in_blocks
from memopt.models.warned import warn
from memopt.pricing.memory import LossMeter
from memopt.pricing.step_meter import StepMeter
from memopt.step.backend import backend_of
from memopt.step.inputs import Call, device_of
from memopt.step.ranks import Ranks, ranks_of
from memopt.step.shards import held_gradients

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord


BEYOND_MEASURED = (
    "a step of the model in parts called more of them than those that were metered, and needed "
    "about {needed}: more than its budget of {budget} bytes. The next ones are planned for that, "
    "but one that calls still more may exceed the budget again: let each step call the same parts "
    "(without layers that are dropped at random), or leave room"
)


class SharedBudget:
    """Divides a budget among the parts of a model.

    Parts that communicate need the same plans on all ranks: the largest figures of any rank count,
    and the first rank plans."""

    def __init__(
        self, model: nn.Module, budget: WrittenBudget, solver: PartSolver, around: Surroundings
    ) -> None:
        self._model, self._written, self.solver, self.around = model, budget, solver, around
        self.in_call, self._arrived = False, True
        self._kinds: dict[Any, StepKind] = {}
        self._now: StepKind | None = None
        self._parts: list[PlannedPart] = []
        self._figures: dict[int, PartFigures] = {}
        self._meter: StepMeter | None = None
        self._sections: list[StepSection] = []
        self._held = memory_of(())
        self._calls = PartCalls()
        self._told_bytes = 0
        self._told_calls = False
        self._unmetered = 0
        self._ranks: Ranks | None = None

    def part(self, name: str, first: PlanRecord, waiting: Callable[[], int]) -> PlannedPart:
        """Add a part, whose first plan is the one of the smallest peak.

        Raises:
            NothingToSaveError: that plan needs no less than the unplanned part.
        """
        model = None if first.profiled is None else first.profiled.captured.model()
        ranks = None if model is None else ranks_of(model)
        self._ranks = ranks or self._ranks
        floor = self.solver.solved(first, MINIMUM) if ranks is None else self._floor(ranks, first)
        if self._now is not None:
            self._now.grown = True
        small = self.solver.small(first, floor)
        if ranks is None and all(saves_nothing(first, one) for one in small):
            raise NothingToSaveError(f"no plan of {name} needs less than it does without one")
        key = name, sum(part.name == name for part in self._parts)
        members = () if ranks is None else ranks.members
        made = PlannedPart(name, first, small, waiting, key, members)
        self._parts.append(made)
        return made

    @property
    def by_itself(self) -> bool:
        """Whether no other ranks plan the parts, too."""
        return self._ranks is None

    def plan_of(self, part: PlannedPart) -> PlanRecord:
        """Return the plan with which a part is to run now."""
        return part.floor if self._now is None else self._now.plans.get(part, part.floor)

    def peak_bytes(self) -> int | None:
        """Return the peak of the last kind of step as far as it was measured; None: not yet."""
        kind = self._now
        if kind is None or not kind.measured:
            return None
        return self._needed(kind, kind.plans)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run a call of the model inside: parts that it calls are in its step."""
        before, self.in_call = self.in_call, True
        try:
            yield
        finally:
            self.in_call = before

    def calling(self, key: Any, call: Call, alone: bool = False) -> None:
        """Begin a call of the model, or of a part that the loop calls `alone`. It is in the same
        step as earlier calls that await their backward, unless an optimizer has stepped since: then
        their outputs are only held, not used."""
        stepped = self.around.has_stepped
        self.around.calling(key, call)
        self.around.settled |= alone
        # Parts without a plan, and the user's code, may await theirs.
        if not stepped and (any(self._waiting()) or (alone and not self._arrived)):
            return
        self._arrived = False
        self._stop()
        self._look_at_calls()
        last, kind = self._now, self._kinds.setdefault(key, StepKind())
        self._now = kind
        charges = self.around.charges(key)
        beside_bytes = charges.resident_bytes + charges.forward_bytes
        # A part hands gradients over while others await their backward.
        beside_bytes += self.around.certain().update_bytes
        if self._ranks is not None:
            agreed_bytes = self._agreed(self._ranks, last, beside_bytes)
            beside_bytes = kind.beside_bytes if agreed_bytes is None else agreed_bytes
        if kind.measured and (kind.changed or beside_bytes > kind.beside_bytes):
            kind.beside_bytes, kind.changed = beside_bytes, False
            self._divide(kind)
        elif kind.seen and not (kind.plans or self._ranks or self._written is None):
            kind.plans, kind.changed = least_unmeasured(kind.seen[-1], self._of), True
        self._check_metered(last)
        begun, kind.begun, kind.grown = kind.begun, True, False
        if begun and is_metered(kind.metered + 1):
            kind.to_agree = True
            self._begin(kind, call)

    def _look_at_calls(self) -> None:
        """Warn, and plan anew, if the last step called more parts than each metered one (layers
        that are dropped at random), and is estimated above its budget."""
        calls, self._calls, kind = self._calls, PartCalls(), self._now
        ranks = self._ranks
        if kind is None:
            return
        if not (kind.saw(calls) if ranks is None else saw(ranks, kind, calls, self._parts)):
            return
        limit = kind.budget_bytes
        if limit is None or not kind.measured:
            return
        needed_bytes = self._needed(kind, kind.plans)
        if ranks is not None:
            needed_bytes = max(ranks.exchanged(needed_bytes, CALLED))
        if needed_bytes <= limit:
            return
        kind.changed = True
        if not self._told_calls and not self._told_bytes:
            self._told_calls = True
            warn(BEYOND_MEASURED.format(needed=format_bytes(needed_bytes), budget=limit))

    def _check_metered(self, last: StepKind | None) -> None:
        """Warn if each of the last steps made plans, so that none could be metered."""
        self._unmetered = self._unmetered + 1 if last is not None and last.grown else 0
        if self._unmetered == METERED and self._written not in (None, MINIMUM):
            warn(
                f"none of the last {METERED} steps of the model in parts could be metered, and the "
                "budget may be exceeded until one is: each made plans of parts for inputs of other "
                "shapes. Pad these to a few sizes, or name parts without such inputs (parts=)",
            )

    def _floor(self, ranks: Ranks, first: PlanRecord) -> PlanRecord:
        """Return the plan of the smallest peak that the first rank makes."""
        key: PartKey = "", 0
        made = by_first(ranks, {key: first}, lambda: {key: self.solver.solved(first, MINIMUM)})
        return made[key]

    def _agreed(self, ranks: Ranks, last: StepKind | None, beside_bytes: int) -> int | None:
        """Take the largest figures of all ranks, if the last step was to be metered.

        Returns:
            The most that any rank holds beside the step; None: the step was not to be metered.
        """
        if last is None or not last.to_agree:
            return None
        found, last.found, last.to_agree = last.found, None, False
        own = None if found is None else (found.base_bytes, [level for level, _ in found.sections])
        everyone = ranks.exchanged(
            (own, beside_bytes, last.tell()), "a budget is divided among parts"
        )
        figures = [figure for figure, *_ in everyone if figure is not None]
        alike = len({len(levels) for _, levels in figures}) == 1
        if found is not None and alike and len(figures) == len(everyone):
            levels = [max(several) for several in zip(*(x for _, x in figures), strict=True)]
            sections = zip(levels, (section for _, section in found.sections), strict=True)
            largest = replace(found, base_bytes=max(x for x, _ in figures))
            self._count(last, replace(largest, sections=tuple(sections)))
        for *_, told in everyone:
            last.hear(told, self._parts)
        return max(one for _, one, _ in everyone)

    def _count(self, kind: StepKind, one: Measured) -> None:
        """Count a metered step, and note whether it asks for other plans."""
        kind.count(one)
        limit = kind.budget_bytes
        over = limit is not None and self._needed(kind, kind.plans) > limit
        kind.changed = kind.changed or over or not kind.plans

    @contextmanager
    def forward(self, part: PlannedPart) -> Iterator[None]:
        """Run the forward of a part inside."""
        self._calls[part] += 1
        if self._meter is not None:
            # `fully_shard` shows gradients that it accumulates when it has gathered their module.
            self._held |= memory_of(held_gradients(self._model))
        self._mark(StepSection(self._waiting(), part, True))
        yield
        self._mark(StepSection(self._waiting()))

    def arrived(self, part: PlannedPart) -> None:
        """Note that the backward of a part's call begins."""
        self._arrived = True
        waiting = self._waiting()
        if part in waiting:
            waiting[part] -= 1
        self._mark(StepSection(waiting, part), backward=True)

    def _mark(self, section: StepSection, backward: bool = False) -> None:
        if self._meter is not None and self._meter.mark(backward):
            self._sections.append(section)

    def _waiting(self) -> dict[PlannedPart, int]:
        found = {part: part.waiting() for part in self._parts}
        return {part: count for part, count in found.items() if count}

    def _begin(self, kind: StepKind, call: Call) -> None:
        device = device_of(self._model, call)
        if not LossMeter.possible(device):
            return
        block_bytes = backend_of(device).block_bytes
        gradients = held_gradients(self._model)
        held = [*self._model.parameters(), *self._model.buffers(), *call.tensors(), *gradients]
        self._held = memory_of(held)
        plans = {part: self._of(self.plan_of(part)) for part in self._parts}
        # Calls of the step before whose outputs are held and not used, which the loop drops as soon
        # as it has the next ones.
        waiting = self._waiting()
        left_bytes = sum(count * plans[part].held for part, count in waiting.items())
        sections = self._sections = [StepSection(waiting)]

        def found(levels: list[int]) -> None:
            if kind.grown or len(levels) != len(sections):
                return  # planning has measured meanwhile
            held_bytes = sum(size for _, size in self._held.values())
            base_bytes = in_blocks(held_bytes, block_bytes) + left_bytes
            made = Measured(base_bytes, tuple(zip(levels, sections, strict=True)), plans)
            if self._ranks is None:
                self._count(kind, made)
            else:
                kind.found = made

        with suppress(ProfilerBusyError):  # another thread's profile has begun since
            self._meter = StepMeter(device, found)

    def _stop(self) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.close()

    def metered_in_the_way(self) -> bool:
        """Return whether this step is metered, so that a part called in a backward (a custom
        autograd function, a reentrant checkpoint) cannot be planned; the next step is then not
        metered."""
        if self._meter is None or self._now is None:
            return False
        self._now.begun = False
        return True

    def forget(self) -> None:
        """Forget what was measured: other parts run from now on."""
        for kind in self._kinds.values():
            kind.measured, kind.metered, kind.changed, kind.grown = [], 0, True, True
            kind.seen, kind.untold, kind.together = [], [], {}
        self._calls = PartCalls()

    def remove(self) -> None:
        """Stop metering."""
        self._stop()

    def _of(self, plan: PlanRecord) -> PartFigures:
        return self._figures.setdefault(id(plan), PartFigures(plan))

    def _needed(
        self, kind: StepKind, plans: Mapping[PlannedPart, PlanRecord], together: bool = False
    ) -> int:
        """Return the peak of a kind of step, total bytes, under these plans."""
        figures = {part: self._of(plans.get(part, part.floor)) for part in self._parts}
        return kind.needed_bytes(figures, together)

    def _divide(self, kind: StepKind) -> None:
        """Plan the parts of a kind of step within the budget."""
        known = [*(one.plans for one in kind.measured), *kind.seen]
        together = list(dict.fromkeys(part for one in known for part in one))
        stored = {part: part.first for part in together}
        if self._written is None:
            kind.plans = stored
            return
        least = self._written == MINIMUM
        budget_bytes = None if least else parse_budget(self._written, self._needed(kind, stored))
        kind.budget_bytes = budget_bytes
        divided = partial(self._divided, kind, budget_bytes, stored)
        if self._ranks is None:
            kind.plans = divided()
        else:
            firsts = {part.key: plan for part, plan in stored.items()}
            made = by_first(
                self._ranks, firsts, lambda: {part.key: one for part, one in divided().items()}
            )
            kind.plans = {part: made[part.key] for part in stored if part.key in made}
        needed_bytes = self._needed(kind, kind.plans)
        if budget_bytes is not None and needed_bytes > budget_bytes:
            self._tell(budget_bytes, needed_bytes)

    def _divided(
        self, kind: StepKind, budget_bytes: int | None, stored: dict[PlannedPart, PlanRecord]
    ) -> dict[PlannedPart, PlanRecord]:
        """Return the parts' plans within a budget: if possible, with room for a step that calls
        each part as often as any step has."""
        small = by_kind(stored, (part.small for part in stored))

        def solved(part: PlannedPart, budget: int) -> PlanRecord:
            return self.solver.solved(part.first, budget)

        for together in (True, False):
            needed = partial(self._needed, kind, together=together)
            made = chosen(budget_bytes, stored, small, solved, needed)
            if budget_bytes is None or needed(made) <= budget_bytes:
                break
        return {part: made[part] for part in stored}

    def _tell(self, budget_bytes: int, least_bytes: int) -> None:
        """Warn that even the parts' smallest plans exceed the budget: once, and again if steps that
        call more parts need a tenth more than the last warning said."""
        if least_bytes <= 1.1 * self._told_bytes:
            return
        self._told_bytes = least_bytes
        warn(
            f"steps of the model in parts exceed their budget of {budget_bytes} bytes: "
            f"under the parts' smallest plans one needs {format_bytes(least_bytes)}, and what "
            f"lies between the parts is not planned: give at least budget={least_bytes}. The "
            "smallest plans run instead",
        )
