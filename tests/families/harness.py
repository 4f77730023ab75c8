"""Plans of real models against the unplanned model: bitwise equality and measured peaks."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import memopt
from memopt.api.plan import Plan
from memopt.errors import InfeasibleBudgetError
from memopt.pricing.memory import metered
from memopt.profiler import Loss, MeasureOptions, Profiled, profile_model
from memopt.step.backend import backend_of
from tests.zoo import Family, call

STEPS = 3
PEAK_TOLERANCE = 0.005
QUIET = False


@dataclass
class Trace:
    """Everything a training run leaves behind, step by step."""

    outputs: list[list[Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    draws: list[Tensor] = field(default_factory=list)
    peak_bytes: int = 0


@dataclass
class Subject:
    """A family's tiny model, profiled once, with the unplanned run to compare with."""

    family: Family
    model: nn.Module
    profiled: Profiled
    initial: dict[str, Tensor]
    reference: Trace


def train(family: Family, module: nn.Module, steps: int = STEPS) -> Trace:
    """A few optimizer steps with dropout on; the peak of the last one is metered."""
    inputs = family.inputs("tiny")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    trace = Trace()
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        with metered(torch.device("cpu")) as use:
            output = call(module, inputs)
            family.loss(output).backward()
        trace.peak_bytes = use.peak_bytes
        trace.draws.append(torch.rand(4))
        leaves = pytree.tree_leaves(output)
        trace.outputs.append([v.detach().clone() for v in leaves if isinstance(v, Tensor)])
        trace.gradients.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
        )
        del output, leaves
        optimizer.step()
        trace.states.append({k: v.clone() for k, v in module.state_dict().items()})
    return trace


@functools.lru_cache(maxsize=1)
def subject(family: Family) -> Subject:
    """The family's subject; the last one is kept, so that its tests share one capture."""
    model = family.build("tiny")
    initial = {k: v.clone() for k, v in model.state_dict().items()}
    reference = train(family, model)
    model.load_state_dict(initial)
    model.zero_grad(set_to_none=True)
    profiled = profile_model(
        model,
        family.inputs("tiny"),
        loss=Loss(family.loss),
        options=MeasureOptions(cap_s=2.0, max_rounds=3),
    )
    return Subject(family, model, profiled, initial, reference)


def floor_plan(one: Subject, strategy: str) -> Plan:
    """The strategy's plan at the smallest budget it can meet."""
    return memopt.plan(one.profiled, budget="min", strategy=strategy, progress=QUIET)


def budgets(one: Subject, strategy: str, shares: tuple[float, ...]) -> Iterator[int]:
    """floor + share·(baseline − floor), total bytes."""
    floor = floor_plan(one, strategy).budget
    assert floor is not None
    for share in shares:
        yield floor + int(share * max(0, one.profiled.baseline.peak_bytes - floor))


def check(one: Subject, plan: Plan, interpreted: bool = False) -> None:
    """Train under the plan and compare everything, bit for bit; check the measured peak."""
    one.model.load_state_dict(one.initial)
    one.model.zero_grad(set_to_none=True)
    planned = plan.apply(one.model, interpreted=interpreted)
    trace = train(one.family, planned)
    compare(one.reference, trace)
    # The step's own scalars are charged as resident, and metered: count them once.
    measured = plan.resident_bytes - backend_of("cpu").step_scalars_bytes + trace.peak_bytes
    if interpreted:
        return
    assert plan.budget is None or measured <= plan.budget, (measured, plan.budget)
    assert abs(measured - plan.peak_bytes) <= PEAK_TOLERANCE * plan.peak_bytes, (
        f"measured {measured}, predicted {plan.peak_bytes}"
    )


def compare(reference: Trace, trace: Trace) -> None:
    """Outputs, gradients, parameters, buffers and random draws are the same bits."""
    for step in range(len(reference.outputs)):
        pairs = zip(reference.outputs[step], trace.outputs[step], strict=True)
        for position, (expected, found) in enumerate(pairs):
            assert torch.equal(expected, found), f"step {step}: output {position}"
        for name, expected_gradient in reference.gradients[step].items():
            found_gradient = trace.gradients[step][name]
            assert (expected_gradient is None) == (found_gradient is None), name
            if expected_gradient is not None and found_gradient is not None:
                assert torch.equal(expected_gradient, found_gradient), (
                    f"step {step}: gradient of {name}"
                )
        for name, value in reference.states[step].items():
            assert torch.equal(value, trace.states[step][name]), f"step {step}: {name}"
        assert torch.equal(reference.draws[step], trace.draws[step]), f"step {step}: random state"


def infeasible_below(one: Subject, plan: Plan) -> bool:
    """Whether one byte less than the plan's floor is refused, naming that floor."""
    assert plan.budget is not None
    try:
        memopt.plan(one.profiled, budget=plan.budget - 1, strategy=plan.strategy, progress=QUIET)
    except InfeasibleBudgetError as error:
        return error.smallest_budget_bytes == plan.budget
    return False
