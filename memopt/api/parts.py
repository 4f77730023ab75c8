"""Wrapping a model that runs in parts: each part's plans come from one profile of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memopt.api.forward_again import small_plans
from memopt.api.plan import Plan
from memopt.api.ranks import find_ranks
from memopt.api.request import PlanRequest
from memopt.api.solving import make_plan
from memopt.models.budget import WrittenBudget, split_reserved
from memopt.models.options import Mismatch, PlanLimits, StepOptions, several

if TYPE_CHECKING:
    from torch import nn

    from memopt.plan_record import PlanRecord
    from memopt.step.inputs import Call


@dataclass(frozen=True)
class PartPlans:
    """Makes the plans of parts (a `PartSolver`).

    Attributes:
        request: what is asked for of the whole.
        members: the ranks that run the whole, ascending; none: this process alone.
    """

    request: PlanRequest
    members: tuple[int, ...] = ()

    def first(
        self, model: nn.Module, call: Call, holding: bool, used: frozenset[int]
    ) -> PlanRecord:
        """Capture and profile a part, whose backward begins at the leaves `used` of its output (at
        all if empty); return its store-all plan. A part that communicates has the same plan on all
        ranks."""
        from memopt.step.loss import LossOfOutputs
        from memopt.step.ranks import members_of, note_members
        from memopt.torch_private.engine_hooks import as_in_forward

        with as_in_forward(model):
            searched = find_ranks(model, call, self.request.pricing.mode)
            if members_of(model):
                note_members(model, tuple(sorted({*members_of(model), *self.members})))
        request = replace(
            self.request,
            strategy="store-all",
            limits=PlanLimits(),
            step=StepOptions(
                loss_fn=LossOfOutputs(used) if used else None,
                accumulate=holding,
                whole_step=False,
            ),
        )
        made = Plan.of(make_plan(model, call, request))
        del searched  # held until here, to be used again
        return made

    def solved(self, first: PlanRecord, budget: WrittenBudget) -> PlanRecord:
        """Plan a profiled part within a budget of its own."""
        request = replace(
            self.request,
            limits=replace(self.request.limits, budget=budget),
            step=StepOptions(whole_step=False),
            progress=False,
        )
        return Plan.of(make_plan(first.profiled, None, request))

    def small(self, first: PlanRecord, floor: PlanRecord) -> tuple[PlanRecord, ...]:
        """Return a part's plans that need little (`small_plans`)."""
        return small_plans(first, floor)


def planned_in_parts(
    planner: Any,
    model: nn.Module,
    on_mismatch: Mismatch,
    shapes: Iterable[object],
    most_plans: int,
    request: PlanRequest,
    parts: str | Iterable[str],
) -> None:
    """Let a planner plan a model's calls, or those of its parts as requested; arguments and errors
    as of `wrap`.

    Raises:
        ValueError: a part that the model does not have, or options that only a whole model takes.
    """
    from memopt.capture.remedies import flattens, inside_fabric
    from memopt.executor.parts import InParts
    from memopt.step.optimizer_state import optimizer_state
    from memopt.step.ranks import members_of

    inner = inside_fabric(model) or model
    names = None if parts == "auto" else _names(inner, parts)
    if request.passes.order or request.passes.place or list(shapes):
        raise ValueError("parts= goes with neither order=True nor place=True nor shapes=")
    if split_reserved(request.limits.budget)[1]:
        raise ValueError('parts= takes a budget of allocated bytes: leave out "reserved"')
    if flat := [name for name, one in inner.named_modules() if name and flattens(one)]:
        raise ValueError(
            f"{flat[0]} is a FullyShardedDataParallel inside of the model, whose gathering parts= "
            "does not follow: take fully_shard"
        )
    optimizer_state(request.step.optimizer, inner.parameters())
    solver = PartPlans(request, members_of(inner))
    # The loss is the whole model's: it is metered.
    planner = replace(planner, loss_fn=None, targets=(), labelled=False)
    InParts(inner, planner, most_plans, on_mismatch, request.limits.budget, solver, names)


def _names(model: nn.Module, parts: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of parts, checked."""
    names = several(parts)
    known = dict(model.named_modules())
    unknown = [one for one in names if not (isinstance(one, str) and one and one in known)]
    if not names or unknown:
        shown = ", ".join(map(repr, unknown)) or "none"
        raise ValueError(
            f'parts= is "auto" or names of sub-modules, as named_modules() has them, got {shown}'
        )
    inside = [(outer, name) for outer in names for name in names if name.startswith(f"{outer}.")]
    if inside:
        outer, name = inside[0]
        raise ValueError(f"{name!r} is inside of {outer!r}: name one of them in parts=")
    return names
