"""Plans that took long to solve are kept on disk by what they were solved for: the priced step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from memopt.api.request import PlanRequest
from memopt.errors import PlanFileError
from memopt.files.plan_store import PlanStore, code_digest
from memopt.models import codec
from memopt.models.budget import MINIMUM, parse_budget, split_reserved
from memopt.models.options import PlanLimits
from memopt.models.progress import Progress
from memopt.models.reader import digest
from memopt.plan_record import STOPPED, BaselineFigures, PlanRecord
from memopt.stages import Preparation
from memopt.strategies import STRATEGIES, Strategy
from memopt.strategies.host_budget import parse_host_budget

if TYPE_CHECKING:
    from torch import nn

    from memopt.step.inputs import Call

KEPT_FROM_S = 1.0
"""Plans solved in less time are not kept: reading and checking one takes about as long."""


def noting_stops(report: Progress, stopped: list[str]) -> Progress:
    """Return a progress callback that adds a note to `stopped` where the user's stops the search,
    by raising KeyboardInterrupt."""

    def noting(fraction: float, what: str) -> None:
        try:
            report(fraction, what)
        except KeyboardInterrupt:
            stopped[:] = [STOPPED]
            raise

    return noting


def recalled(
    step: Preparation,
    strategy: Strategy,
    host_budget_bytes: int | None,
    wanted: PlanRequest,
    make: Callable[[], PlanRecord],
) -> PlanRecord:
    """Return the stored plan for a step with the same graph and costs, with this step's capture; if
    there is none, make it, and store it if that took long."""
    key = _key(step, strategy, host_budget_bytes, wanted)
    if key is None:
        return make()
    profiled, store = step.profiled, PlanStore()
    found = store.find(key)
    if found is not None and profiled is not None and found.graph == profiled.graph:
        base = profiled.baseline
        baseline = BaselineFigures(base.peak_bytes, base.step_time_s, base.measured)
        found = replace(
            found,
            graph=profiled.graph,
            baseline=baseline,
            profiled=profiled,
            record=profiled.record,
        )
        if is_within(wanted.limits, found):
            return found
    begun_s = time.monotonic()
    made = make()
    if time.monotonic() - begun_s >= KEPT_FROM_S:
        store.renew(key, lambda: made)
    return made


def is_within(limits: PlanLimits, plan: PlanRecord) -> bool:
    """Whether a plan from disk keeps the budgets of a request: they are part of its key, but its
    file may have been edited, or put in place of another."""
    size, _ = split_reserved(limits.budget)
    budget = None if size == MINIMUM else size
    wanted = parse_budget(budget, plan.baseline.peak_bytes), parse_host_budget(limits.host_budget)
    pairs = zip(wanted, (plan.budget, plan.host_budget), strict=True)
    return all(most is None or (own is not None and own <= most) for most, own in pairs)


def _key(
    step: Preparation, strategy: Strategy, host_budget_bytes: int | None, wanted: PlanRequest
) -> str | None:
    """Digest all that a solve depends on; None if its plan is not stored."""
    profiled = step.profiled
    own = type(strategy) in {type(one) for one in STRATEGIES}  # the code of others may change
    of_reserved = split_reserved(step.budget)[1]  # depends on the allocator's settings, too
    if profiled is None or not wanted.keep or step.ranks is not None or not own or of_reserved:
        return None
    try:
        encoded = [codec.encode(one) for one in (profiled.graph, profiled.record, step.device)]
    except PlanFileError:
        return None  # an argument that a file cannot hold
    asked = (
        strategy,
        step.budget,
        profiled.baseline.peak_bytes,
        host_budget_bytes,
        wanted.limits.time_limit_s,
        wanted.passes,
        step.charges,
        profiled.stages,
    )
    return digest([code_digest(), "solved", encoded, repr(asked)])


def key_of_call(model: nn.Module, call: Call, request: PlanRequest) -> str | None:
    """Digest all that a plan depends on and that is known without capturing the model; None: the
    loss or an argument has no text that tells it from others."""
    from memopt.pricing.baseline import loss_text
    from memopt.profiler import Loss
    from memopt.step.inputs import device_of
    from memopt.step.optimizer_state import optimizer_state
    from memopt.step.record import record_of
    from memopt.step.shards import held_gradients

    text: str | None = ""
    if request.step.loss_fn is not None:
        text = loss_text(Loss(request.step.loss_fn, request.step.targets))
        if text is None:
            return None
    try:
        record = codec.encode(record_of(model, call, device_of(model, call)))
    except PlanFileError:
        return None  # an argument that a file cannot hold
    options = request.options
    asked = [repr(options[name]) for name in sorted(options.keys() - _NOT_IN_KEYS)]
    state = optimizer_state(request.step.optimizer, model.parameters())
    held_bytes = sum(gradient.nbytes for gradient in held_gradients(model))
    marks = (call.whole_masks, call.orders)
    return digest([code_digest(), record, asked, repr(state), marks, held_bytes, text])


_NOT_IN_KEYS = {"loss_fn", "targets", "cache", "optimizer"}
"""Left out of keys: plans do not depend on `cache`; loss and optimizer's state have own texts."""
