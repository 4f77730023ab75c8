"""Makes the plans of one part of a model that runs in parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from memopt.errors import GuardError
from memopt.executor.arena import ArenaFamily
from memopt.executor.differentiated import used_leaves
from memopt.executor.measured_parts import PlannedPart
from memopt.executor.module import (
    captured_of,
    waiting_calls,
    when_arrived,
    when_run_again,
)
from memopt.executor.plan_maker import Made, PlanMaker, Planner
from memopt.executor.shared_budget import SharedBudget
from memopt.executor.surroundings import Surroundings
from memopt.models.charges import NO_CHARGES, Charges
from memopt.step.captured import Captured
from memopt.step.inputs import Call

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord


@dataclass(eq=False)
class MadePart(Made):
    """A part's plan that is ready to run.

    Attributes:
        used: the leaves of the output from which it has a backward; all if empty."""

    part: PlannedPart | None = None
    used: frozenset[int] = frozenset()

    def spare_bytes(self) -> int:
        """Return 0: the parts share a budget."""
        return 0


class PlannedCalls(Protocol):
    """A sub-module that plans its own calls."""

    name: str
    model: nn.Module
    family: ArenaFamily
    around: Surroundings

    def instead(self, model: nn.Module, call: Call, error: GuardError) -> nn.Module:
        """Return the module for a call whose plan no longer fits (an `OnMismatch`)."""

    def run_again(self, why: str) -> None:
        """Count a call that ran again for its backward."""


class PartMaker(PlanMaker):
    """Makes the plans of one part, within the budget that it shares.

    The backward of the first call shows which of the part's outputs the loss uses (a language model
    may use one of a vision model's hidden states). From the next call on, plans leave out the
    gradients of the others, and what is kept for these."""

    def __init__(self, planning: PlannedCalls, planner: Planner, shared: SharedBudget) -> None:
        self._planning, self._planner, self._shared = planning, planner, shared
        self.alone = True
        self._modules: dict[int, MadePart] = {}

    def made(self, kind: Any, holding: bool, call: Call, beside: Charges = NO_CHARGES) -> Made:
        """Plan a kind of the part's calls."""
        own, used = self._planning, self._planner.outputs
        first = self._shared.solver.first(own.model, call, holding, used)
        waiting: list[nn.Module] = []
        part = self._shared.part(own.name, first, lambda: sum(map(waiting_calls, waiting)))
        made = self._applied(part, part.floor, call, used)
        waiting.append(made.module)
        return made

    def improved(self, made: Made, kind: Any, call: Call) -> Made | None:
        """Return the part under the plan that its present share of the budget allows."""
        if not isinstance(made, MadePart) or made.part is None:
            return None
        plan = self._shared.plan_of(made.part)
        return None if plan is made.plan else self._applied(made.part, plan, call, made.used)

    def _applied(
        self, part: PlannedPart, plan: PlanRecord, call: Call, used: frozenset[int]
    ) -> MadePart:
        known = self._modules.get(id(plan))
        if known is None:
            own = self._planning
            module = self._planner.apply(plan, own.model, call, own.instead, own.family)
            when_arrived(module, partial(self._arrived_at, part, captured_of(module)))
            when_run_again(module, own.run_again)
            known = self._modules[id(plan)] = MadePart(module, plan, NO_CHARGES, NO_CHARGES)
            known.part, known.used = part, used
        return known

    def _arrived_at(
        self,
        part: PlannedPart,
        captured: Captured,
        _tangents: list[Any],
        missing: frozenset[int],
        _kept: bool,
    ) -> None:
        """Note that a backward of the part begins, and which tangents are missing."""
        used = used_leaves(captured, missing) if missing and self._shared.by_itself else frozenset()
        if not used <= self._planner.outputs:
            self._planner.train_with(used)
            self._shared.forget()
        self._shared.arrived(part)

    def keeps(self, made: Made, kind: Any, call: Call) -> bool:
        """Return whether a plan stays: it is for the outputs that the loss uses, or cannot be made
        anew now."""
        of_others = isinstance(made, MadePart) and made.used != self._planner.outputs
        return not (of_others and self._planning.around.can_measure(call))

    def met(self, kind: Any, made: Made) -> None:
        """Do nothing: the whole model checks its budget."""
