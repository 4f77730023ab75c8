"""memopt.wrap: one line, and a model plans its own training steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from memopt.api.improving import Improving
from memopt.api.parts import planned_in_parts
from memopt.api.plan import Plan
from memopt.api.ranks import find_ranks, planning_ranks, telling_ranks
from memopt.api.recalled import is_within, key_of_call
from memopt.api.request import PlanRequest
from memopt.api.solving import make_plan
from memopt.errors import InfeasibleBudgetError, PlanFileError
from memopt.files.plan_store import PlanStore
from memopt.models.budget import MINIMUM, check_budget, is_share
from memopt.models.device import Device
from memopt.models.options import (
    Mismatch,
    PassOptions,
    PlanLimits,
    Pricing,
    Returns,
    StepOptions,
    check_own_calls,
    parse_mismatch,
    parse_returns,
)
from memopt.models.progress import Progress
from memopt.plan_record import PlanRecord
from memopt.strategies import Strategy, resolve

if TYPE_CHECKING:
    from torch import nn

    from memopt.executor.arena import ArenaFamily
    from memopt.executor.module import OnMismatch, PlannedModule, Running
    from memopt.executor.plan_maker import Asked
    from memopt.executor.self_planning import SelfPlanning
    from memopt.step.inputs import Call

M = TypeVar("M", bound="nn.Module")


@telling_ranks("a model is wrapped")
def wrap(
    model: M,
    budget: int | float | str | None = None,
    strategy: str | Strategy = "auto",
    *,
    loss_fn: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] | Callable[..., tuple[Any, ...]] = (),
    on_mismatch: Mismatch = "plan",
    returns: Returns = "all",
    shapes: Iterable[Any] = (),
    most_plans: int = 16,
    host_budget: int | str | None = None,
    device: Device | str | None = None,
    optimizer: Any = None,
    order: bool = False,
    place: bool = False,
    time_limit_s: float | None = None,
    kernels: str = "aten",
    improve: bool = True,
    cache: bool = True,
    progress: bool | Progress = True,
    parts: str | Iterable[str] | None = None,
) -> M:
    """Let a model plan its own training calls within the budget: the first call of each kind
    (shapes, dtypes, autocast, whether gradients exist already) plans for all of that kind.

    The model is changed in place and returned: it keeps its class, its attributes and its files;
    copies and pickles of it are plain models. Calls in eval mode or without gradients run as
    before. `model.calls` counts how calls ran, `model.plans` are the plans that are ready to run
    (if the model has attributes of these names: `memopt.running(model).calls` and `.plans`);
    `memopt.unwrap(model)` undoes it. Plans are kept on disk (MEMOPT_CACHE_DIR) and shared by
    processes.

    Args:
        model: the module that is called in training, or what Lightning Fabric's `setup` made of
            it.
        budget: as for `memopt.plan`, for each kind of call. Where a share is too small for one
            kind, that of the kind planned so far that needs most holds.
        strategy: as for `memopt.plan`.
        loss_fn: your loss, `loss_fn(output, *targets)`: its own memory is charged. None: the
            output's `loss`, if the call has `labels` or the like (`return_loss`); the other
            outputs get no gradient. Else the budget covers the module alone.
        targets: what your loss takes beside the output: a tuple, or a function of the call's
            arguments that makes it.
        on_mismatch: what happens in a kind of call that has no plan: "plan" makes one; once the
            first kind is planned, "original" runs others unplanned, "error" raises GuardError.
        returns: "loss" leaves out, in planned calls, the outputs that the loss does not read, as
            for `memopt.plan`.
        shapes: example inputs to plan for now, each as `inputs` of `memopt.plan`. With
            `place=True` their plans use one arena in turn, where budgets leave it room.
        most_plans: how many kinds of calls stay ready to run.
        improve: train with a plan that is made at once, look for a better one in a process of its
            own, and take it over between two steps, which changes no bit; for "auto" without
            `order` and `place`, where a better plan may pay back, and budgets other than "min".
            False: search first, then train.
        parts: "auto": if the model cannot be captured whole, plan its largest sub-modules that can
            be, within the one budget; `model.memopt.report()` lists them. Names of sub-modules:
            plan these. None: plan the whole, or raise; where `fully_shard` has sharded sub-modules,
            plan each of them between its gatherings.
        host_budget, device, optimizer, order, place, time_limit_s, kernels, cache, progress: as
            for `memopt.plan`; `cache=False` keeps no plans on disk either.

    Raises:
        ValueError: unreadable arguments, an optimizer that trains no parameter of the model, or a
            model that is wrapped or compiled already, or whose class has a `__call__` of its own.
        InfeasibleBudgetError, CaptureError: at the first call of a kind; see `memopt.plan`.
    """
    from torch import nn

    from memopt.capture.remedies import inside_fabric
    from memopt.step.loss import check_targets
    from memopt.torch_private.engine_hooks import sharded_parts

    if not isinstance(model, nn.Module):
        raise ValueError(f"wrap takes an nn.Module, got {type(model).__name__}")
    on_mismatch = parse_mismatch(on_mismatch)
    check_budget(budget, time_limit_s)
    check_own_calls(improve, most_plans, shapes)
    check_targets(loss_fn, targets)
    request = PlanRequest(
        resolve(strategy),
        PlanLimits(budget, host_budget, time_limit_s),
        StepOptions(optimizer=optimizer, whole_step=False, returns=parse_returns(returns)),
        Pricing(device, kernels=kernels, cache=cache),
        PassOptions(order, place),
        progress=progress,
    )
    planner = OwnCallsPlanner(request, loss_fn, targets, improve=improve and not (order or place))
    if parts is None:
        parts = sharded_parts(inside_fabric(model) or model) or None
    in_parts = partial(planned_in_parts, request=request, parts=parts or ())
    (planned_by if parts is None else in_parts)(planner, model, on_mismatch, shapes, most_plans)
    return model


def planned_by(
    planner: OwnCallsPlanner,
    model: nn.Module,
    on_mismatch: Mismatch,
    shapes: Iterable[Any] = (),
    most_plans: int = 16,
) -> None:
    """Let a planner plan a model's own calls; arguments and errors as of `wrap`."""
    from memopt.capture.remedies import inside_fabric
    from memopt.executor.self_planning import SelfPlanning
    from memopt.step.optimizer_state import optimizer_state

    inner, optimizer = inside_fabric(model) or model, planner.request.step.optimizer
    optimizer_state(optimizer, inner.parameters())
    made = SelfPlanning(inner, planner, most_plans, on_mismatch, with_state=optimizer is None)
    made.prepare(shapes)


def unwrap(model: M) -> M:
    """Undo `wrap`: the model runs as before.

    Raises:
        ValueError: it is not wrapped.
    """
    from memopt.capture.remedies import inside_fabric
    from memopt.executor.self_planning import planning_of

    made = planning_of(inside_fabric(model) or model)
    if made is None:
        raise ValueError("this model is not wrapped")
    made.remove()
    return model


def running(model: nn.Module) -> SelfPlanning | Running:
    """Return how a wrapped model or a planned module runs, whatever its own attributes' names.

    Returns:
        Of a wrapped model: `.calls`, how many calls ran in which way, and `.plans`, those that are
        ready to run. Of a planned module (`plan.apply`): `.calls`, `.original` and `.code`.

    Raises:
        ValueError: it is neither.
    """
    from memopt.capture.remedies import inside_fabric
    from memopt.executor.module import PlannedModule
    from memopt.executor.module import running as running_planned
    from memopt.executor.self_planning import planning_of

    made = planning_of(inside_fabric(model) or model)
    if made is not None:
        return made
    if isinstance(model, PlannedModule):
        return running_planned(model)
    raise ValueError(
        "this model is neither wrapped nor planned: pass a model after memopt.wrap, or what "
        "plan.apply returned"
    )


@dataclass
class OwnCallsPlanner:
    """Makes the plans of a wrapped model as requested, and calls `made` with each."""

    request: PlanRequest
    loss_fn: Callable[..., Any] | None
    targets: tuple[Any, ...] | Callable[..., tuple[Any, ...]]
    made: Callable[[Plan], None] | None = None
    improve: bool = False
    """Whether to run a quickly made plan first, where the strategy has one, and a better one later.
    """
    labelled: bool = True
    """Whether calls with `labels` or the like compute their own loss."""
    outputs: frozenset[int] = frozenset()
    """The leaves of the output that the loss was seen to use; empty: unknown."""
    most_bytes: int = 0
    """The largest budget, in bytes, that a share has meant for any kind of call so far."""

    def charges_loss(self, call: Call) -> bool:
        """Whether a plan for the call charges its loss."""
        from memopt.capture.own_loss import has_own_loss

        return self.loss_fn is not None or (self.labelled and has_own_loss(call))

    def guesses_loss(self, call: Call) -> bool:
        """Whether a plan for the call assumes a loss that the user did not name."""
        named = self.loss_fn is not None or self.request.step.returns == "loss"
        return not named and (bool(self.outputs) or self.charges_loss(call))

    def train_with(self, outputs: frozenset[int]) -> None:
        """Make later plans for a loss that also uses these leaves of the output."""
        self.labelled = False
        self.outputs |= outputs

    def promises(self) -> bool:
        """Whether the user asked for a certain budget: neither none nor "min"."""
        return self.request.limits.budget not in (None, MINIMUM)

    def __call__(
        self,
        model: nn.Module,
        call: Call,
        asked: Asked,
        instead: OnMismatch,
        family: ArenaFamily,
    ) -> tuple[PlannedModule, Plan]:
        """Plan a call; return the model under its plan, and the plan."""
        module, plan = self._planned(model, call, asked, instead, family)
        if is_share(self.request.limits.budget):
            self.most_bytes = max(self.most_bytes, plan.budget or 0)
        if self.made is not None:
            self.made(plan)
        return module, plan

    def _planned(
        self,
        model: nn.Module,
        call: Call,
        asked: Asked,
        instead: OnMismatch,
        family: ArenaFamily,
    ) -> tuple[PlannedModule, Plan]:
        from memopt.capture.own_loss import NoLossError

        request = self._request(call, asked)
        try:
            plan, again = self._plan(model, call, request)
        except NoLossError:
            if self.loss_fn is not None or request.step.returns == "loss":
                raise
            # This model's `labels` or the like are no targets of a loss.
            self.labelled = False
            request = replace(request, step=replace(request.step, loss_fn=None, targets=()))
            plan, again = self._plan(model, call, request)
        try:
            return self.apply(plan, model, call, instead, family), plan
        except PlanFileError:
            if again is None:
                raise
        # Something that the key leaves out has changed, such as the model's own code.
        plan = again()
        return self.apply(plan, model, call, instead, family), plan

    @staticmethod
    def apply(
        plan: PlanRecord, model: nn.Module, call: Call, instead: OnMismatch, family: ArenaFamily
    ) -> PlannedModule:
        from memopt.executor.apply import apply_plan

        return apply_plan(plan, model, call, on_mismatch=instead, family=family)

    def _plan(
        self, model: nn.Module, call: Call, request: PlanRequest
    ) -> tuple[Plan, Callable[[], Plan] | None]:
        """Return a plan and, if it was read from disk, the function that makes it anew. If a share
        is too small for one kind of call (a last, smaller batch), the largest budget that it meant
        for another kind holds."""
        try:
            return self._plan_within(model, call, request)
        except InfeasibleBudgetError as error:
            if not is_share(request.limits.budget) or self.most_bytes <= (error.budget_bytes or 0):
                raise
        limits = replace(request.limits, budget=self.most_bytes)
        return self._plan_within(model, call, replace(request, limits=limits))

    def _plan_within(
        self, model: nn.Module, call: Call, request: PlanRequest
    ) -> tuple[Plan, Callable[[], Plan] | None]:
        searched = find_ranks(model, call, request.pricing.mode)
        # Of ranks that plan together, not all might find the plan on disk.
        alone = planning_ranks(model, request.pricing.mode) is None
        at_once = self.improve and alone and request.limits.budget != MINIMUM
        first = resolve(request.strategy).at_first() if at_once else None

        def make() -> PlanRecord:
            if first is not None:
                with contextlib.suppress(InfeasibleBudgetError):
                    return make_plan(model, call, replace(request, strategy=first))
            return make_plan(model, call, request)

        store = PlanStore() if request.pricing.cache and alone else None
        key = None if store is None else key_of_call(model, call, request)
        if store is None or key is None:
            return Plan.of(make()), None

        def answers(plan: PlanRecord) -> bool:
            searched = first is not None or plan.strategy.improved_by() is None
            return searched and is_within(request.limits, plan)

        record, kept = store.get(key, make, answers)
        del searched  # held until here, to be used again
        return Plan.of(record), (lambda: Plan.of(store.renew(key, make))) if kept else None

    def improving(
        self, model: nn.Module, call: Call, asked: Asked, plan: PlanRecord, beside_bytes: int
    ) -> Improving | None:
        """Begin to look for a better plan than one made at once."""
        strategy = plan.strategy.improved_by() if self.improve else None
        if strategy is None or plan.reserved_bytes_limited:
            return None
        request = self._request(call, asked)
        limit_s = request.limits.time_limit_s
        if not strategy.worth_improving(plan.step_time_s, plan.lower_bound_s, limit_s):
            return None
        key = key_of_call(model, call, request) if request.pricing.cache else None

        def keep(made: PlanRecord) -> None:
            if key is not None:
                PlanStore().renew(key, lambda: made)

        limit_bytes = None if plan.budget is None else plan.budget - beside_bytes
        aloud = request.progress is True
        return Improving(plan, strategy, limit_bytes, limit_s, keep, aloud)

    def _request(self, call: Call, asked: Asked) -> PlanRequest:
        from memopt.capture.own_loss import own_loss
        from memopt.step.loss import LossOfOutputs

        loss_fn, targets = self.loss_fn, self.targets
        if loss_fn is None and self.charges_loss(call):
            loss_fn = own_loss
        elif loss_fn is None and self.outputs:
            loss_fn = LossOfOutputs(self.outputs)
        if callable(targets):
            targets = targets(*call.args, **call.kwargs)
        limits, step = self.request.limits, self.request.step
        return replace(
            self.request,
            limits=replace(limits, budget=asked.budget_bytes or limits.budget),
            step=replace(step, loss_fn=loss_fn, targets=targets, accumulate=asked.holding),
            charges=asked.charges,
        )
