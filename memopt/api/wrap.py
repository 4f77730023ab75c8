"""memopt.wrap: one line, and a model plans its own training steps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from memopt.api.cells import code_digest
from memopt.api.plan import Plan
from memopt.api.solving import PlanRequest, make_plan
from memopt.errors import PlanFileError
from memopt.files.plan_store import PlanStore
from memopt.models import codec
from memopt.models.budget import MINIMUM, parse_budget
from memopt.models.device import Device
from memopt.strategies import Progress, Strategy, resolve

if TYPE_CHECKING:
    from torch import nn

    from memopt.executor.module import PlannedModule
    from memopt.executor.self_planning import SelfPlanning
    from memopt.profiler.inputs import Call

M = TypeVar("M", bound="nn.Module")

Mismatch = Literal["plan", "original", "error"]


def wrap(
    model: M,
    budget: int | float | str | None = None,
    strategy: str | Strategy = "rotor",
    *,
    loss_fn: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] | Callable[..., tuple[Any, ...]] = (),
    on_mismatch: Mismatch = "plan",
    shapes: Iterable[Any] = (),
    most_plans: int = 16,
    host_budget: int | str | None = None,
    device: Device | str | None = None,
    optimizer: Any = None,
    order: bool = False,
    place: bool = False,
    time_limit_s: float | None = None,
    kernels: str = "aten",
    cache: bool = True,
    progress: bool | Progress = True,
) -> M:
    """Let a model plan its own training calls: each kind of call (shapes, dtypes, autocast,
    whether gradients are there already) at the first one, within the budget.

    The model is changed in place and returned: it keeps its class, its attributes and its files;
    copies and pickles of it are plain models. Calls in eval mode or without gradients run as
    before. `model.calls` counts how calls ran, `model.memopt.plans` are the plans that are ready to
    run; `memopt.unwrap(model)` undoes it. Plans are kept on disk (MEMOPT_CACHE_DIR) and shared by
    processes.

    Args:
        model: the module that is called in training.
        budget: as for `memopt.plan`, for each kind of call.
        strategy: as for `memopt.plan`.
        loss_fn: your loss, `loss_fn(output, *targets)`: its own memory is charged. None: if the
            call has `labels`, and the output a `loss`, that is the loss; the other outputs get no
            gradient. Else the budget covers the module alone.
        targets: what your loss takes beside the output: a tuple, or a function of the call's
            arguments that makes it.
        on_mismatch: what a kind of call does that has no plan: "plan" makes one; "original" runs
            it unplanned after the first kind was planned; "error" raises GuardError.
        shapes: example inputs to plan for now, each as `inputs` of `memopt.plan`.
        most_plans: how many kinds of calls stay ready to run.
        host_budget, device, optimizer, order, place, time_limit_s, kernels, cache, progress: as
            for `memopt.plan`; `cache=False` keeps no plans on disk either.

    Raises:
        ValueError: unreadable arguments, or a model that is wrapped or compiled already.
        InfeasibleBudgetError, CaptureError: at the first call of a kind; see `memopt.plan`.
    """
    from torch import nn

    from memopt.executor.module import Calls
    from memopt.executor.self_planning import SelfPlanning

    if not isinstance(model, nn.Module):
        raise ValueError(f"wrap takes an nn.Module, got {type(model).__name__}")
    if on_mismatch not in ("plan", "original", "error"):
        raise ValueError(f"on_mismatch= is one of 'plan', 'original', 'error', got {on_mismatch!r}")
    parse_budget(None if budget == MINIMUM else budget, 1)
    request = PlanRequest(
        budget=budget,
        strategy=resolve(strategy),
        host_budget=host_budget,
        device=device,
        optimizer=optimizer,
        order=order,
        place=place,
        time_limit_s=time_limit_s,
        cache=cache,
        progress=progress,
        kernels=kernels,
    )
    planner = _Planner(request, loss_fn, targets)
    made = SelfPlanning(model, planner, most_plans, on_mismatch)
    model.__dict__["memopt"] = made
    if isinstance(model.__dict__.get("calls", made.calls), Calls):
        model.__dict__["calls"] = made.calls
    for inputs in shapes:
        made.prepare(inputs)
    return model


def unwrap(model: M) -> M:
    """Undo `wrap`: the model runs as before.

    Raises:
        ValueError: it is not wrapped.
    """
    made = model.__dict__.get("memopt")
    if made is None:
        raise ValueError("this model is not wrapped")
    made.remove()
    for name, value in (("memopt", made), ("calls", made.calls)):
        if model.__dict__.get(name) is value:
            del model.__dict__[name]
    return model


@dataclass
class _Planner:
    """Makes the plans of a wrapped model."""

    request: PlanRequest
    loss_fn: Callable[..., Any] | None
    targets: tuple[Any, ...] | Callable[..., tuple[Any, ...]]

    def __call__(
        self, model: nn.Module, call: Call, holding: bool, asking: SelfPlanning
    ) -> tuple[PlannedModule, Plan]:
        """See `memopt.executor.self_planning.Planner`."""
        from memopt.executor.apply import apply_plan

        request = self._request(call, holding)
        store = PlanStore() if request.cache else None
        key = None if store is None else _key(model, call, request)
        kept = False
        if store is None or key is None:
            plan = Plan.of(make_plan(model, call, request))
        else:
            plan, kept = self._from(store, key, model, call, request)
        try:
            return apply_plan(plan, model, call, otherwise=asking.instead), plan
        except PlanFileError:
            if store is None or key is None or not kept:
                raise
        # What the key does not tell has changed: the model's own code, for one.
        store.drop(key)
        plan, _ = self._from(store, key, model, call, request)
        return apply_plan(plan, model, call, otherwise=asking.instead), plan

    @staticmethod
    def _from(
        store: PlanStore, key: str, model: nn.Module, call: Call, request: PlanRequest
    ) -> tuple[Plan, bool]:
        record, kept = store.get(key, lambda: make_plan(model, call, request))
        return Plan.of(record), kept

    def _request(self, call: Call, holding: bool) -> PlanRequest:
        loss_fn, targets = self.loss_fn, self.targets
        if loss_fn is None and call.kwargs.get("labels") is not None:
            loss_fn = _own_loss
        if callable(targets):
            targets = targets(*call.args, **call.kwargs)
        return replace(self.request, loss_fn=loss_fn, targets=targets, accumulate=holding)


def _own_loss(output: Any) -> Any:
    """The loss that a model of Hugging Face's computes itself from its labels."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output:
        loss = output[0]
    if loss is None:
        raise ValueError(
            "the model is called with labels and returns no loss: pass loss_fn= to memopt.wrap"
        )
    return loss


def _key(model: nn.Module, call: Call, request: PlanRequest) -> str | None:
    """What a plan depends on, as far as it can be told without capturing the model; None: the loss
    cannot be told from another one."""
    from memopt.profiler import Loss
    from memopt.profiler.baseline import loss_text
    from memopt.profiler.inputs import device_of
    from memopt.profiler.record import record_of

    text = ""
    if request.loss_fn is not None:
        told = loss_text(Loss(request.loss_fn, request.targets))
        if told is None:
            return None
        text = told
    record = record_of(model, call, device_of(model, call))
    asked = (
        request.budget,
        request.strategy,
        request.host_budget,
        request.device,
        request.optimizer,
        request.order,
        request.place,
        request.time_limit_s,
        request.accumulate,
        request.kernels,
    )
    whole = [code_digest(), codec.encode(record), [repr(one) for one in asked], text]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
