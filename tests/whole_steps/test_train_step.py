"""Train steps against eager: loss, parameters, buffers and optimizer state, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memopt
from memopt.api.plan import Plan
from memopt.errors import ExecutionError, GuardError
from memopt.executor.train_step import TrainStep
from memopt.models.graph import Phase

Optimizer = torch.optim.Optimizer
Make = Callable[[nn.Module], Optimizer]


class Residual(nn.Module):
    """Convolutions, batch norm, a skip connection, dropout: a small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 5)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + self.body(x)
        found: Tensor = self.head(self.drop(x.mean((2, 3))))
        return found


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices only, and another rate for the head."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if p.dim() > 1 and "head" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if p.dim() == 1 and "head" not in n]},
        {"params": [p for n, p in named if "head" in n], "lr": 0.05},
    ]


MAKES: dict[str, Make] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda m: torch.optim.SGD(groups(m), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(groups(m), lr=0.01),
}


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(7)
    return [(torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))) for _ in range(count)]


def planned(
    make: Make, strategy: Any = "olla", **arguments: Any
) -> tuple[nn.Module, Optimizer, Plan]:
    torch.manual_seed(0)
    model = Residual()
    optimizer = make(model)
    x, y = batches(1)[0]
    plan = memopt.plan(
        model, x, loss_fn=nn.functional.cross_entropy, targets=(y,), optimizer=optimizer,
        strategy=strategy, cache=False, progress=False, **arguments,
    )  # fmt: skip
    return model, optimizer, plan


def eager(make: Make, scheduled: bool = False) -> tuple[nn.Module, Optimizer, list[Tensor]]:
    torch.manual_seed(0)
    model = Residual()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if scheduled else None
    losses = []
    data = batches()
    torch.manual_seed(1)
    for x, y in data:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if scheduler is not None:
            scheduler.step()
    return model, optimizer, losses


def run(step: TrainStep, optimizer: Optimizer, scheduled: bool = False) -> list[Tensor]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if scheduled else None
    losses = []
    data = batches()
    torch.manual_seed(1)
    for x, y in data:
        losses.append(step(x, targets=(y,)))
        if scheduler is not None:
            scheduler.step()
    return losses


def assert_same(found: Any, expected: Any) -> None:
    """Bitwise equality of nested states."""
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", MAKES)
def test_three_steps_equal_eager(name: str, scheduled: bool) -> None:
    make = MAKES[name]
    expected_model, expected_optimizer, expected_losses = eager(make, scheduled)
    model, optimizer, plan = planned(make)
    step = plan.train_step(model, nn.functional.cross_entropy, optimizer)
    losses = run(step, optimizer, scheduled)
    assert_same(losses, expected_losses)
    assert_same(model.state_dict(), expected_model.state_dict())
    assert_same(optimizer.state_dict(), expected_optimizer.state_dict())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("strategy", ["store-all", "olla"])
def test_strategies_and_interpreter(strategy: str, interpreted: bool) -> None:
    make = MAKES["adamw"]
    expected_model, _, expected_losses = eager(make)
    model, optimizer, plan = planned(make, strategy)
    step = plan.train_step(model, nn.functional.cross_entropy, optimizer, interpreted=interpreted)
    assert_same(run(step, optimizer), expected_losses)
    assert_same(model.state_dict(), expected_model.state_dict())


def test_swapping_step_equals_eager() -> None:
    make = MAKES["momentum"]
    expected_model, _, expected_losses = eager(make)
    model, optimizer, plan = planned(make, "offload-graph", budget="min")
    _, _, unlimited = planned(make, "store-all")
    assert plan.peak_bytes < unlimited.peak_bytes
    step = plan.train_step(model, nn.functional.cross_entropy, optimizer)
    assert_same(run(step, optimizer), expected_losses)
    assert_same(model.state_dict(), expected_model.state_dict())


def test_recomputing_strategies_plan_the_module_alone_unless_asked() -> None:
    model, optimizer, plan = planned(MAKES["momentum"], "rotor")
    plan.apply(model)
    with pytest.raises(ValueError, match=r"not of a whole step.*whole_step=True"):
        plan.train_step(model, nn.functional.cross_entropy, optimizer)
    with pytest.raises(ValueError, match="monet plans no whole steps"):
        planned(MAKES["momentum"], "monet", whole_step=True)
    with pytest.raises(ValueError, match=r"a torch\.optim instance"):
        memopt.plan(model, batches(1)[0][0], whole_step=True, progress=False)


@pytest.mark.parametrize(
    ("strategy", "interpreted"),
    [("rotor", False), ("rotor", True), ("rotor-free", False), ("dynprog", False)],
)
def test_chain_strategies_plan_whole_steps(strategy: str, interpreted: bool) -> None:
    make = MAKES["adamw"]
    expected_model, expected_optimizer, expected_losses = eager(make)
    link = memopt.Device(to_host_bytes_per_s=1e9)
    model, optimizer, plan = planned(make, strategy, budget="min", whole_step=True, device=link)
    _, _, unlimited = planned(make, "store-all")
    assert plan.peak_bytes < unlimited.peak_bytes
    assert plan.graph is not None
    assert not plan.graph.gradients
    step = plan.train_step(model, nn.functional.cross_entropy, optimizer, interpreted=interpreted)
    assert_same(run(step, optimizer), expected_losses)
    assert_same(model.state_dict(), expected_model.state_dict())
    assert_same(optimizer.state_dict(), expected_optimizer.state_dict())
    with pytest.raises(ValueError, match="train_step"):
        plan.apply(model)


def test_planning_changes_nothing() -> None:
    torch.manual_seed(0)
    fresh = Residual()
    model, optimizer, plan = planned(MAKES["momentum"])
    assert_same(model.state_dict(), fresh.state_dict())
    assert not optimizer.state
    assert plan.graph is not None
    updates = [op for op in plan.graph.operators if op.phase is Phase.UPDATE]
    assert len(updates) == len([p for n, p in model.named_parameters() if "unused" not in n])
    assert not plan.graph.gradients


def test_a_parameter_outside_the_optimizer_keeps_its_gradient() -> None:
    def make(model: nn.Module) -> Optimizer:
        assert isinstance(model, Residual)
        return torch.optim.SGD(model.head.parameters(), lr=0.1)

    model, optimizer, plan = planned(make)
    assert isinstance(model, Residual)
    twin = copy.deepcopy(model)
    x, y = batches(1)[0]
    torch.manual_seed(1)
    plan.train_step(model, nn.functional.cross_entropy, optimizer)(x, targets=(y,))
    torch.manual_seed(1)
    nn.functional.cross_entropy(twin(x), y).backward()
    assert_same(model.stem.weight.grad, twin.stem.weight.grad)
    assert model.head.weight.grad is None
    everything = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="this optimizer trains and the planned one does not"):
        plan.train_step(model, nn.functional.cross_entropy, everything)
    less = torch.optim.SGD([model.head.bias], lr=0.1)
    with pytest.raises(ValueError, match="the planned optimizer trains and this one does not"):
        plan.train_step(model, nn.functional.cross_entropy, less)


class Squares(torch.optim.SGD):
    """An optimizer memopt does not know."""


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS"),
        (lambda m: Squares(m.parameters(), lr=0.1), "Squares"),
        (
            lambda m: torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1),
            "no parameter.*returns the loss",
        ),
    ],
)
def test_what_cannot_be_split_is_named(make: Make, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        planned(make)


class WeighedSquares(nn.Module):
    """A model and a loss with parameters in one module, which returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (((self.net(x) - y) * self.weight) ** 2).mean()


def test_a_loss_with_parameters_trains_as_a_part_of_the_model() -> None:
    """What the refusal of a parameter outside the model tells users to do."""

    def itself(loss: Tensor) -> Tensor:
        return loss

    torch.manual_seed(0)
    model, inputs = WeighedSquares(), (torch.randn(5, 4), torch.randn(5, 3))
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(one.parameters()) for one in (model, eager)]
    plan = memopt.plan(
        model, inputs, loss_fn=itself, optimizer=optimizers[0], strategy="olla", progress=False
    )
    step = plan.train_step(model, itself, optimizers[0])
    for _ in range(2):
        step(*inputs)
        eager(*inputs).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert not torch.equal(model.weight, torch.ones(3))
    assert_same(model.state_dict(), eager.state_dict())


def test_hooks_are_refused() -> None:
    def hooked(model: nn.Module) -> Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    with pytest.raises(ValueError, match="step hooks"):
        planned(hooked)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        with pytest.raises(ValueError, match="hooks on all optimizers"):
            planned(MAKES["sgd"])
    finally:
        handle.remove()


def test_other_calls_and_left_over_gradients_are_refused() -> None:
    model, optimizer, plan = planned(MAKES["sgd"])
    step = plan.train_step(model, nn.functional.cross_entropy, optimizer)
    x, y = batches(1)[0]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(GuardError):
        step(x[:2], targets=(y[:2],))
    next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
    with pytest.raises(ExecutionError, match="zero_grad"):
        step(x, targets=(y,))
    assert_same(model.state_dict(), before)
    with pytest.raises(ValueError, match="train_step"):
        plan.apply(model)


def test_a_step_that_fails_between_updates_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, plan = planned(MAKES["sgd"])
    step = plan.train_step(model, nn.functional.cross_entropy, optimizer)
    x, y = batches(1)[0]
    buffers = copy.deepcopy(dict(model.named_buffers()))
    real, calls = type(optimizer).step, []

    def failing(self: Optimizer) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no memory")
        real(self)

    monkeypatch.setattr(type(optimizer), "step", failing)
    with pytest.raises(ExecutionError, match=r"after 2 of .*no memory"):
        step(x, targets=(y,))
    assert_same(dict(model.named_buffers()), buffers)
    assert all(p.grad is None for p in model.parameters())
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


def loaded(plan: Plan, tmp_path: Path) -> Plan:
    plan.save(tmp_path / "step.plan")
    return memopt.load(tmp_path / "step.plan")


@pytest.mark.parametrize("strategy", ["olla", "rotor"])
def test_a_saved_whole_step_runs_after_loading(strategy: str, tmp_path: Path) -> None:
    make = MAKES["adamw"]
    expected_model, expected_optimizer, expected_losses = eager(make)
    _, _, plan = planned(make, strategy, budget="min", whole_step=True)
    again = loaded(plan, tmp_path)
    assert again.program == plan.program
    torch.manual_seed(0)
    model = Residual()
    optimizer = make(model)
    step = again.train_step(model, nn.functional.cross_entropy, optimizer)
    assert_same(run(step, optimizer), expected_losses)
    assert_same(model.state_dict(), expected_model.state_dict())
    assert_same(optimizer.state_dict(), expected_optimizer.state_dict())


def test_a_saved_whole_step_refuses_other_steps(tmp_path: Path) -> None:
    _, _, plan = planned(MAKES["momentum"])
    again = loaded(plan, tmp_path)
    loss = nn.functional.cross_entropy

    def refused(model: nn.Module, loss: Any, make: Make, why: str) -> None:
        with pytest.raises(memopt.PlanFileError, match=why):
            again.train_step(model, loss, make(model))

    refused(Residual().eval(), loss, MAKES["momentum"], "train mode")
    refused(nn.Linear(3, 3), loss, MAKES["momentum"], "parameter")
    refused(Residual(), loss, lambda m: torch.optim.AdamW(m.parameters()), "of optimizer state")
    refused(Residual(), nn.functional.multi_margin_loss, MAKES["momentum"], "captured steps differ")
    with pytest.raises(ValueError, match="train_step"):
        again.apply(Residual())
