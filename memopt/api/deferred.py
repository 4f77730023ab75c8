"""A plan without example inputs: it is made at the first training step, from that step's inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from html import escape
from typing import TYPE_CHECKING, Any, cast

from memopt.api.plan import Plan
from memopt.api.ranks import telling_ranks
from memopt.api.request import PlanRequest
from memopt.api.solving import make_plan, planned_device
from memopt.api.whole_step import check_movable, check_rules, takes_whole_step
from memopt.api.wrap import OwnCallsPlanner, planned_by
from memopt.errors import InfeasibleBudgetError, NotYetPlannedError
from memopt.models.budget import (
    MINIMUM,
    check_budget,
    exact_bytes,
    format_bytes,
    parse_budget,
    split_reserved,
)
from memopt.models.checks import MOST_BYTES
from memopt.models.device import in_blocks
from memopt.models.options import Mismatch, parse_returns
from memopt.models.step_rules import scales
from memopt.plan_record import PlanRecord
from memopt.report.texts import aligned
from memopt.strategies import resolve
from memopt.strategies.host_budget import parse_host_budget

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memopt.executor.train_step import TrainStep
    from memopt.step.inputs import Call

WAITS = (
    "this plan waits for its first training step, whose inputs it is made for: "
    "module = plan.apply(model), and train; or pass example inputs, memopt.plan(model, inputs, ...)"
)
_FIELDS = frozenset(one.name for one in fields(PlanRecord))


@dataclass(frozen=True)
class FixedBytes:
    """The bytes of a model that are known before its inputs are.

    Attributes:
        weights: parameters and buffers.
        state: the optimizer's state, if the optimizer was named.
        gradients: a gradient for each parameter that is trained.
    """

    weights: int
    state: int
    gradients: int

    @property
    def resident(self) -> int:
        """Bytes that stay during the whole step."""
        return self.weights + self.state

    @classmethod
    def of(cls, model: nn.Module, optimizer: Any) -> FixedBytes:
        """Count a model's bytes in the blocks of its device's allocator.

        Raises:
            ValueError: an unknown optimizer, or a kind of device that memopt does not know.
        """
        from memopt.step.backend import BACKENDS
        from memopt.step.optimizer_state import optimizer_state
        from memopt.step.shards import local_part
        from memopt.torch_private.tensors import storage_key

        parameters = list(model.parameters())
        storages: dict[int, int] = {}
        gradients = 0
        for tensor in (*parameters, *model.buffers()):
            own = local_part(tensor)
            kind = BACKENDS.get(own.device.type)
            block_bytes = 1 if kind is None else kind.block_bytes
            storage = own.untyped_storage()
            storages[storage_key(storage)] = in_blocks(storage.nbytes(), block_bytes)
            if tensor.requires_grad:
                gradients += in_blocks(own.nbytes, block_bytes)
        state = optimizer_state(optimizer, parameters).bytes_total
        return cls(sum(storages.values()), state, gradients)


class DeferredPlan(Plan):
    """A plan of a model whose inputs are not known yet.

    `apply(model)` lets the model plan its own training calls, as `memopt.wrap` does: the first one,
    and each further kind of call when it comes. `train_step` does the same for whole steps. Once a
    plan is made, this object stands for the plan made last, with its figures, plots and files.
    Before that, `summary()` says what it waits for, and everything else raises NotYetPlannedError.

    Attributes:
        known: the bytes of parameters, buffers, optimizer state and gradients.
        resident_bytes: those of them that stay during the whole step.
        strategy: the strategy that will plan.
    """

    known: FixedBytes
    _request: PlanRequest

    def __init__(self, model: nn.Module, request: PlanRequest) -> None:
        known = FixedBytes.of(model, request.step.optimizer)
        self.__dict__.update(
            known=known,
            resident_bytes=known.resident,
            strategy=resolve(request.strategy),
            _request=request,
        )
        self._check_budget()

    def __getattribute__(self, name: str) -> Any:
        # A class's default stands for a field that has none yet.
        if name in _FIELDS and name not in object.__getattribute__(self, "__dict__"):
            raise NotYetPlannedError(f"no {name} yet: {WAITS}")
        return object.__getattribute__(self, name)

    @telling_ranks("a plan is applied", 1)
    def apply(
        self,
        model: nn.Module,
        inputs: Any = None,
        *,
        interpreted: bool = False,
        on_mismatch: Mismatch = "plan",
        checked: bool = False,
        cuda_graph: bool = False,
    ) -> nn.Module:
        """Let the model plan its own training calls, the first one of each kind, within this plan's
        budget. The model is changed in place and returned, as by `memopt.wrap`;
        `memopt.unwrap(model)` undoes it.

        Args:
            model: the model to train.
            inputs: example inputs to plan for now, not at the first call.
            on_mismatch: what happens in a call of another kind than the first: "plan" plans for it,
                "original" runs it unplanned, "error" raises GuardError.
            interpreted, checked, cuda_graph: for plans with inputs only.

        Raises:
            ValueError: the request is for whole steps, or for what needs inputs.
            InfeasibleBudgetError, CaptureError: at the first call; see `memopt.plan`.
        """
        if interpreted or checked or cuda_graph:
            raise ValueError(
                "interpreted=, checked= and cuda_graph= run one planned step: pass example inputs, "
                "memopt.plan(model, inputs, ...), and apply that plan"
            )
        if _asks_for_whole_step(self._request):
            raise ValueError(
                "this plan is for whole steps: step = plan.train_step(model, loss_fn, optimizer)"
            )
        step = self._request.step
        request = replace(
            self._request, step=replace(step, whole_step=False, loss_fn=None, targets=())
        )
        planner = OwnCallsPlanner(request, step.loss_fn, step.targets, self._become)
        planned_by(planner, model, on_mismatch, () if inputs is None else (inputs,))
        return model

    @telling_ranks("a plan is applied", 1)
    def train_step(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        *,
        interpreted: bool = False,
        checked: bool = False,
        undo: bool = False,
        scaler: Any = None,
    ) -> TrainStep:
        """Return the whole step, which is planned when it is first called, for that call's inputs
        and targets; arguments, calls and errors as of `Plan.train_step`.

        Raises:
            ValueError: the strategy plans no whole steps.
        """
        step = self._request.step
        rules = replace(step.rules, scaled=step.rules.scaled or scales(scaler))
        step = replace(step, loss_fn=loss_fn, optimizer=optimizer, whole_step=True, rules=rules)
        request = replace(self._request, step=step)
        takes_whole_step(self.strategy, request)
        check_rules(request, self.strategy)

        def make(call: Call, targets: Any) -> TrainStep:
            step = replace(request.step, targets=targets)
            plan = Plan.of(make_plan(model, call, replace(request, step=step)))
            self._become(plan)
            how: dict[str, Any] = {"interpreted": interpreted, "checked": checked}
            return plan.train_step(model, loss_fn, optimizer, undo=undo, scaler=scaler, **how)

        return cast("TrainStep", DeferredStep(make))

    def summary(self) -> str:
        """Say what the plan waits for, and what is known without inputs."""
        known, limits = self.known, self._request.limits
        state = f" and {format_bytes(known.state)} of optimizer state" if known.state else ""
        budget = limits.budget
        size = format_bytes(budget) if isinstance(budget, int) else budget or "no limit"
        with_gradients = format_bytes(known.resident + known.gradients)
        rows = [
            ("strategy", self.strategy.name),
            ("budget", str(size)),
            ("resident", f"{format_bytes(known.weights)} of parameters and buffers{state}"),
            ("needs", f"{with_gradients} or more, once all trained parameters have gradients"),
            ("waits for", "the first training step: plan.apply(model), and train;"),
            ("", "or for example inputs: memopt.plan(model, inputs, ...)"),
        ]
        return "\n".join(aligned(rows))

    def _become(self, plan: Plan) -> None:
        """Be this plan from now on."""
        self.__dict__.update(plan.__dict__)
        object.__setattr__(self, "__class__", Plan)

    def _check_budget(self) -> None:
        """Refuse a budget that the weights alone exceed.

        Raises:
            InfeasibleBudgetError: the budget is below the bytes of parameters, buffers and
                optimizer state.
        """
        step, (size, _) = self._request.step, split_reserved(self._request.limits.budget)
        if size in (None, MINIMUM) or step.movable or step.offload_optimizer:
            return
        budget, fixed = parse_budget(size, 1), self.known.resident
        if budget != parse_budget(size, MOST_BYTES):
            return  # a share of the baseline's peak, which is not known yet
        if budget is not None and budget < fixed:
            raise InfeasibleBudgetError(
                f"no plan of any kind trains this model within {exact_bytes(budget)}: its "
                "parameters, buffers and optimizer state alone are "
                f"{exact_bytes(fixed)}. Raise the budget, or let them move: "
                'movable="all" with strategy="offload-graph"',
                budget,
            )

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.summary())}</pre>"

    def __repr__(self) -> str:
        return f"<memopt.DeferredPlan {self.strategy.name}: not yet planned>"


class DeferredStep:
    """A whole step that is planned when it is first called; then everything is the TrainStep's.

    Args:
        make: makes the step for a call of the model and its targets.
    """

    def __init__(self, make: Callable[[Call, Any], TrainStep]) -> None:
        self._make, self._step = make, cast("TrainStep | None", None)

    def __call__(self, *args: Any, targets: Any = (), **kwargs: Any) -> torch.Tensor:
        """Train on one batch and return its loss, as `TrainStep` does."""
        from memopt.step.inputs import Call

        return self._made(Call(args, kwargs), targets)(*args, targets=targets, **kwargs)

    def accumulate(self, micro_batches: Iterable[tuple[Any, Any]]) -> torch.Tensor:
        """Train on several micro-batches, as `TrainStep.accumulate` does."""
        from memopt.step.inputs import to_call

        listed = list(micro_batches)
        if not listed:
            raise ValueError("accumulate takes at least one (inputs, targets)")
        inputs, targets = listed[0]
        return self._made(to_call(inputs), targets).accumulate(listed)

    def _made(self, call: Call, targets: Any) -> TrainStep:
        if self._step is None:
            self._step = self._make(call, targets)
        return self._step

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._step is None:
            raise NotYetPlannedError(f"no {name} yet: the step is planned when it is first called")
        return getattr(self._step, name)


def deferred(model: nn.Module, request: PlanRequest) -> DeferredPlan:
    """Check a request for a model without inputs, and return its plan that waits for them.

    Raises:
        ValueError: the request needs inputs, or is wrong in itself; the message has the remedy.
        InfeasibleBudgetError: the budget is below what the model's weights need.
    """
    strategy = resolve(request.strategy)
    step, limits = request.step, request.limits
    check_budget(limits.budget, limits.time_limit_s)
    parse_host_budget(limits.host_budget)
    parse_returns(step.returns)
    planned_device(request.pricing.device, request.pricing.mode)
    if request.pricing.mode == "estimate":
        raise ValueError(
            'mode="estimate" runs no step that could bring inputs: pass example inputs (on "meta" '
            "they take no memory)"
        )
    if step.movable or step.steady_state:
        check_movable(request, strategy)
    check_rules(request, strategy)
    return DeferredPlan(model, request)


def _asks_for_whole_step(request: PlanRequest) -> bool:
    """Tell whether a request has an option that only whole steps have."""
    step = request.step
    return bool(step.whole_step or step.offload_optimizer or step.movable or step.rules)
