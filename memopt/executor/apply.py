"""Applying a plan to a model: the one it was made from, or another with the same graph."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from memopt.errors import PlanFileError
from memopt.executor.module import PlannedModule, install
from memopt.executor.runtime import Runtime
from memopt.models.serialize import fingerprint
from memopt.profiler.build import Lowering, build
from memopt.profiler.capture import Captured, capture

if TYPE_CHECKING:
    from memopt.plan import Plan

_RUNTIMES: weakref.WeakKeyDictionary[object, Runtime] = weakref.WeakKeyDictionary()


def runtime_of(captured: Captured) -> Runtime:
    """The one runtime of a captured model: its joint graph is compiled once."""
    runtime = _RUNTIMES.get(captured.hooks)
    if runtime is None:
        runtime = Runtime(captured)
        _RUNTIMES[captured.hooks] = runtime
    return runtime


def apply_plan(plan: Plan, model: nn.Module, *, interpreted: bool = False) -> PlannedModule:
    """See `Plan.apply`."""
    if plan.profiled is None or plan.program is None:
        raise ValueError(
            "this plan was made from a cost model, not from a module: it cannot run; "
            "call memopt.plan(model, inputs, ...)"
        )
    captured, lowering = plan.profiled.captured, plan.profiled.lowering
    if captured.model() is not model:
        captured, lowering = _recapture(plan, model)
    installed = install(captured, lowering, plan.program, interpreted=interpreted)
    return PlannedModule(model, captured, runtime_of(captured), installed)


def _recapture(plan: Plan, model: nn.Module) -> tuple[Captured, Lowering]:
    assert plan.profiled is not None
    captured = capture(model, plan.profiled.captured.call)
    block_bytes = 512 if plan.profiled.torch_device.type == "cuda" else 1
    lowering = build(model, captured, block_bytes)
    if fingerprint(lowering.graph) != fingerprint(plan.profiled.lowering.graph):
        raise PlanFileError(
            "this plan was made for another model: the captured graphs differ. Plan again with "
            "memopt.plan(model, inputs, ...)"
        )
    return captured, lowering
