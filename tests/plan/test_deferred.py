"""Plans without inputs: made at the first step, from its inputs."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt import InfeasibleBudgetError
from memopt.errors import GuardError, NotYetPlannedError


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def batches(count: int = 3, size: int = 512) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 64, generator=generator),
            torch.randint(10, (size,), generator=generator),
        )
        for _ in range(count)
    ]


loss_fn = nn.CrossEntropyLoss()


def train(module: nn.Module, model: nn.Module) -> list[torch.Tensor]:
    """Train as in the README; return the losses and the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs, target in batches():
        loss = loss_fn(module(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_as_the_readme_says_it() -> None:
    plain = make_model()
    expected = train(plain, plain)
    model = make_model()
    plan = memopt.plan(model, budget="1200KiB", strategy="rotor")
    before = plan.summary()
    assert isinstance(plan, memopt.Plan)
    assert "rotor" in before
    assert "1200KiB" in before
    assert "waits for" in before
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert plan.resident_bytes == weights
    assert f"{2 * weights / 2**10:.1f} KiB or more" in before
    assert max(map(len, before.splitlines())) <= 80
    module = plan.apply(model)
    assert same(train(module, model), expected)
    after = plan.summary()
    assert "recomputed" in after
    assert plan.peak_bytes <= 1200 * 2**10 == plan.budget
    assert memopt.running(module).calls.planned == 3
    assert plan.check(make_model(), batches()[0][0]).measured_peak_bytes <= 1200 * 2**10
    assert pickle.loads(pickle.dumps(plan)).program == plan.program


def test_a_whole_step_is_planned_at_its_first_call() -> None:
    plain = make_model()
    expected = train(plain, plain)
    model = make_model()
    plan = memopt.plan(model, budget="1200KiB", strategy="rotor")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = plan.train_step(model, loss_fn, optimizer)
    with pytest.raises(NotYetPlannedError, match="no code yet: the step is planned when"):
        _ = step.code
    losses = [step(inputs, targets=(target,)) for inputs, target in batches()]
    assert same([*losses, *(p.detach() for p in model.parameters())], expected)
    assert plan.peak_bytes <= 1200 * 2**10
    assert step.code


def test_micro_batches_are_planned_at_their_first_call() -> None:
    model = make_model()
    plan = memopt.plan(model, strategy="olla", micro_batches=2)
    with pytest.raises(ValueError, match="for whole steps"):
        plan.apply(model)
    step = plan.train_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = step.accumulate([(inputs, (target,)) for inputs, target in batches(2)])
    assert losses.shape == (2,)
    assert "Olla" in plan.summary()


def test_it_is_planned_for_every_kind_of_call() -> None:
    model = make_model()
    plan = memopt.plan(model, budget="1600KiB", strategy="rotor")
    module = plan.apply(model)
    for inputs, target in [*batches(1), *batches(1, size=32)]:
        loss_fn(module(inputs), target).backward()
        peak = plan.peak_bytes
        model.zero_grad()
    assert len(memopt.running(module).plans) == 2  # type: ignore[union-attr]
    assert peak == memopt.running(module).plans[-1].peak_bytes  # type: ignore[union-attr]
    strict = memopt.plan(make_model(), budget="1600KiB", strategy="rotor").apply(
        make_model(), on_mismatch="error"
    )
    strict(batches(1)[0][0]).sum().backward()
    strict.zero_grad()
    with pytest.raises(GuardError, match="no plan for this kind of call"):
        strict(batches(1, size=32)[0][0])


def test_with_inputs_at_apply_it_is_planned_at_once() -> None:
    model = make_model()
    plan = memopt.plan(model, budget="1200KiB", strategy="rotor")
    plan.apply(model, batches(1)[0][0])
    assert plan.peak_bytes <= 1200 * 2**10


def test_before_it_has_no_figures_and_says_so() -> None:
    plan = memopt.plan(make_model(), strategy="rotor")
    for name in ("peak_bytes", "program", "profiled", "notes", "gap"):
        with pytest.raises(NotYetPlannedError, match="yet: this plan waits"):
            getattr(plan, name)
    assert not hasattr(plan, "graph")
    assert repr(plan) == "<memopt.DeferredPlan rotor: not yet planned>"
    assert "waits for" in plan._repr_html_()
    with pytest.raises(NotYetPlannedError):
        pickle.dumps(plan)
    with pytest.raises(NotYetPlannedError):
        plan.plot()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"mode": "estimate", "device": "H100"}, "estimate.* pass example inputs"),
        ({"strategy": "best"}, "unknown strategy"),
        ({"budget": "much"}, "budget is"),
        ({"movable": "all", "strategy": "rotor"}, "moves no parameters"),
        ({"optimizer": "best"}, "optimizer"),
        ({"returns": "none"}, "returns="),
    ],
)
def test_what_is_wrong_is_refused_at_once(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memopt.plan(make_model(), **how)


def test_a_budget_below_the_weights_is_refused_at_once() -> None:
    model = make_model()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    with pytest.raises(InfeasibleBudgetError, match=f"alone are {weights} bytes"):
        memopt.plan(model, budget=weights - 1)
    with pytest.raises(InfeasibleBudgetError, match=f"alone are {3 * weights} bytes"):
        memopt.plan(model, budget=weights, optimizer="adamw")
    assert memopt.plan(model, budget=weights).resident_bytes == weights


def test_what_needs_one_planned_step_is_refused() -> None:
    model = make_model()
    plan = memopt.plan(model)
    with pytest.raises(ValueError, match="pass example inputs"):
        plan.apply(model, checked=True)
    monet = memopt.plan(model, strategy="monet")
    with pytest.raises(ValueError, match="monet plans no whole steps"):
        monet.train_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
